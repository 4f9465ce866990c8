"""From noise to latents: kernels, densities, schedules, noise plans, trees and solvers.  Imports torch alone."""

from samplers import candidates, density, estimates, fork_plans, kernels, merges, noise, noise_plans, schedules, solvers
from samplers.layout import TreeLayout, tree_layout
from samplers.tree import RolloutTree, rollout

__all__ = [
    "RolloutTree",
    "TreeLayout",
    "candidates",
    "density",
    "estimates",
    "fork_plans",
    "kernels",
    "merges",
    "noise",
    "noise_plans",
    "rollout",
    "schedules",
    "solvers",
    "tree_layout",
]
