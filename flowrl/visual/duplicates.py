"""Pictures of a group that are copies of each other: nothing can be learned from comparing them."""

from collections.abc import Sequence

from flowrl.visual.policy import Example
from samplers import RolloutTree


def refuse_duplicates(tree: RolloutTree, examples: Sequence[Example]) -> None:
    """RuntimeError if leaves of a group that were drawn apart end in equal latents.  examples: that of each leaf"""
    for group in tree.group.unique().tolist():
        leaves = (tree.group == group).nonzero()[:, 0]
        rows = tree.final[leaves].unique()  # leaves that share a state are meant to be equal
        distinct = len(tree.states[rows.to(tree.states.device)].flatten(1).unique(dim=0))
        if distinct < len(rows):
            prompt = examples[leaves[0]].prompt[:60]
            raise RuntimeError(
                f"{len(rows) - distinct} of the {len(rows)} pictures of {prompt!a} are copies: "
                "their noise was the same. The policy's noise() and the parts rollout.noise and rollout.kernel must "
                "draw anew for every rollout."
            )
