"""What the states on a rollout's paths are worth, and where the best paths of the groups lead."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor

from flowrl.groups import group_rank
from flowrl.recipe import Recipe
from flowrl.visual.points import Column
from flowrl.visual.policy import Example
from flowrl.visual.score import Score, show
from rewards.table import RewardTable
from samplers import RolloutTree


@torch.no_grad()
def along_paths(
    recipe: Recipe,
    tree: RolloutTree,
    table: RewardTable,
    examples: Sequence[Example],
    velocity: Callable,
    decode: Callable,
    score: Score,
) -> tuple[RewardTable, Float[Tensor, "N T1"] | None]:
    """(table, score of every state on each leaf's path), by the estimate there; None where no role asks for it.

    Each distinct state is estimated and shown to the rewards once, as many at a time as there are leaves. A leaf of
    which a score failed is invalid in the table that is returned.
    """
    if recipe.estimate is None:
        return table, None
    finals, edge = tree.final[tree.finished], tree.edge
    value, valid = torch.zeros(len(tree.states)), torch.ones(len(tree.states), dtype=torch.bool)
    value[finals], valid[finals] = table.total()[tree.finished].to(value), table.valid[tree.finished]
    sigma, prompt, leaf = _of_states(tree)
    others = torch.ones(len(value), dtype=torch.bool).scatter(0, finals, 0).nonzero()[:, 0]
    for rows in others.split(max(int(tree.finished.sum()), 1)):
        latents = tree.states[rows.to(tree.states.device)]
        known = {"latents": latents, "sigma": sigma[rows].to(latents.device), "prompt": prompt[rows]}
        shown, level = recipe.estimate(**known, velocity=velocity)
        whose = [examples[i] for i in leaf[rows].tolist()]
        found = show(score, decode, shown, whose, tree.group[leaf[rows]], level)
        value[rows], valid[rows] = found.total().to(value), found.valid
    taken, last = edge >= 0, tree.step_next[edge.max(1).values]
    assert bool((tree.source[edge[taken]] >= 0).all()), "a state on a path was not kept by the rollout"
    states = torch.full((len(edge), edge.shape[1] + 1), torch.nan)
    states[:, :-1][taken] = value[tree.source[edge[taken]]]
    states = states.scatter(1, last[:, None], value[tree.final][:, None])
    scored = torch.where(taken, valid[tree.source[edge]], True).all(1) & valid[tree.final]
    return replace(table, valid=table.valid & scored), states.to(table.value.dtype)


def score_finished(tree: RolloutTree, examples: Sequence[Example], decode: Callable, score: Score) -> RewardTable:
    """What the rewards say of the finished pictures; a candidate that ended before is told what its path came to."""
    rows = tree.finished.nonzero()[:, 0]
    table = show(score, decode, tree.leaves(), [examples[i] for i in rows.tolist()], tree.group[rows])
    of_leaf = tree.finished.cumsum(0) - 1  # a root's finished leaf comes first
    valid = table.valid[of_leaf] | ~tree.finished
    return replace(table, value=table.value[of_leaf], valid=valid, group=tree.group)


def _of_states(tree):
    """(sigma, prompt, a leaf) of every state that was kept."""
    leaf, count = per_edge(tree, torch.arange(len(tree.edge))), len(tree.states)
    out = tree.sigmas.new_zeros(count), tree.prompt.new_zeros(count), leaf.new_zeros(count)
    for end, step in ((tree.source, tree.step), (tree.target, tree.step_next)):
        kept = end >= 0
        for table, x in zip(out, (tree.sigmas[step], tree.edge_prompt, leaf), strict=True):
            table[end[kept]] = x[kept]
    return out


@torch.no_grad()
def of_best_paths(recipe: Recipe, tree: RolloutTree, table: RewardTable, velocity: Callable) -> tuple[Column, ...]:
    """best_velocity of every drawn edge, if a part asks: at its step on the path to the best leaf of its group.

    By the policy that drew. The leaves of a group are on one rank.
    """
    if "best_velocity" not in recipe.needs:
        return ()
    best = (group_rank(torch.where(table.valid, table.total(), -torch.inf), tree.group) == 0).nonzero()[:, 0]
    groups, place = torch.unique(tree.group, return_inverse=True)
    leader = torch.zeros(len(groups), dtype=torch.long).scatter(0, place[best], best)
    drawn = tree.noisy.nonzero()[:, 0]
    ahead = tree.edge[leader[per_edge(tree, place)[drawn]], tree.step[drawn]]
    edges, row = torch.unique(ahead, return_inverse=True)
    device = tree.states.device
    latents, sigma = tree.states[tree.source[edges].to(device)], tree.sigmas[tree.step[edges]].to(device)
    of_edge = torch.zeros(len(tree.source), dtype=torch.long).scatter(0, drawn, row)
    return (Column("best_velocity", of_edge, velocity(latents, sigma, tree.edge_prompt[edges])),)


def per_edge(
    tree: RolloutTree, per_leaf: Num[Tensor, " N"], counted: Bool[Tensor, " N"] | None = None
) -> Num[Tensor, " E"]:
    """What the counted leaves below an edge agree on, [N] -> [E], by default all of them; 0 where there is none."""
    counted = torch.ones(len(tree.edge), dtype=torch.bool) if counted is None else counted
    out, taken = per_leaf.new_zeros(len(tree.source)), (tree.edge >= 0) & counted[:, None]
    out[tree.edge[taken]] = per_leaf[:, None].expand(tree.edge.shape)[taken]
    return out
