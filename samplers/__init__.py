"""From noise to latents: kernels, densities, schedules, noise plans, trees and solvers.  Imports torch alone."""

from samplers import density, kernels, noise, noise_plans, schedules, solvers
from samplers.tree import RolloutTree, TreeLayout, rollout, tree_layout

__all__ = [
    "RolloutTree",
    "TreeLayout",
    "density",
    "kernels",
    "noise",
    "noise_plans",
    "rollout",
    "schedules",
    "solvers",
    "tree_layout",
]
