"""Methods whose rollouts branch."""

from flowrl.advantages import outcome, tree
from flowrl.objectives import clipped, select, weights
from flowrl.part import part
from flowrl.recipe import Recipe
from flowrl.recipes.visual.steps import dance_grpo
from samplers import noise


def branch_grpo() -> Recipe:
    """BranchGRPO: DanceGRPO on a binary tree: fork at four steps, compare the edges of one depth.  arXiv:2509.06040"""
    return dance_grpo().but(
        rollout={"steps": 20, "forks": {0: 2, 3: 2, 6: 2, 9: 2}, "noise": part(noise.correlated, strength=4.0)},
        advantage=part(outcome.raw),
        credit=part(tree.tree_depthwise, ddof=1, eps=1e-8, clamp=5.0),
        select=part(select.drawn),
        weight=part(weights.edge_mean),
        objective=part(clipped.ppo_clip, clip_low=1e-3, clip_high=1e-3),
    )
