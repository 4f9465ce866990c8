"""What the states on a rollout's paths are worth, and where the best paths of the groups lead."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Num
from torch import Tensor

from flowrl.groups import group_rank
from flowrl.recipe import Recipe
from flowrl.visual.points import Column
from flowrl.visual.policy import Example
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
    score: Callable,
) -> tuple[RewardTable, Float[Tensor, "N T1"] | None]:
    """(table, score of every state on each leaf's path), by the clean estimate there; None where no role asks for it.

    Each distinct state is estimated, decoded and scored once, as many at a time as there are leaves. A leaf of which
    a score failed is invalid in the table that is returned.
    """
    if recipe.estimate is None:
        return table, None
    leaf, edge = per_edge(tree, torch.arange(len(tree.edge))), tree.edge
    _, first = torch.unique(tree.source, return_inverse=True)
    one = torch.full((int(first.max()) + 1,), -1).scatter(0, first, torch.arange(len(first)))  # an edge of each state
    value, valid = torch.zeros(len(one)), torch.zeros(len(one), dtype=torch.bool)
    for rows in torch.arange(len(one)).split(len(edge)):
        at = one[rows]
        latents = tree.states[tree.source[at].to(tree.states.device)]
        sigma = tree.sigmas[tree.step[at]].to(latents.device)
        clean = recipe.estimate(latents=latents, sigma=sigma, prompt=tree.edge_prompt[at], velocity=velocity)
        found = score(decode(clean), [examples[i] for i in leaf[at].tolist()], tree.group[leaf[at]])
        value[rows], valid[rows] = found.total().to(value), found.valid
    before = torch.where(edge >= 0, first[edge], -1)
    scored = torch.where(edge >= 0, valid[before], True).all(1)
    states = torch.cat([torch.where(edge >= 0, value[before], torch.nan), table.total().to(value)[:, None]], 1)
    return replace(table, valid=table.valid & scored), states.to(table.value.dtype)


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


def per_edge(tree: RolloutTree, per_leaf: Num[Tensor, " N"]) -> Num[Tensor, " E"]:
    """What the leaves below an edge agree on, [N] -> [E]; an edge below which there is no leaf gets 0."""
    out, taken = per_leaf.new_zeros(len(tree.source)), tree.edge >= 0
    out[tree.edge[taken]] = per_leaf[:, None].expand(tree.edge.shape)[taken]
    return out
