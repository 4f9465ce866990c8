"""Spread a rollout's advantage over its decisions: (advantage [N], edge [N, T], ...) -> [N, T].

Credit is the last act: whatever clamps or multiplies per step happens here, never in `weight`.
Decisions that do not exist (edge -1) get 0.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowrl.groups import group_centre, group_count, group_mean, group_spread, group_std

Advantage = Float[Tensor, " N"]
Edge = Int[Tensor, "N T"]
Group = Int[Tensor, " N"]
Credit = Float[Tensor, "N T"]


def broadcast(advantage: Advantage, edge: Edge) -> Credit:
    """Every decision is credited with the outcome."""
    return torch.where(edge >= 0, advantage[:, None], 0)


def tree_value(advantage: Advantage, edge: Edge) -> Credit:
    """Value of an edge: mean advantage of the leaves below it."""
    each, flat = advantage[:, None].expand(edge.shape).flatten(), edge.flatten()
    value = torch.where(group_spread(each, flat) > 0, group_mean(each, flat), each)  # equal leaves: their very value
    return torch.where(edge >= 0, value.view(edge.shape), 0)


def edge_share(edge: Edge) -> Int[Tensor, "N T"]:
    """How many leaves take each edge."""
    return group_count(edge.flatten()).view(edge.shape)


def tree_depthwise(
    advantage: Advantage,
    edge: Edge,
    group: Group,
    *,
    ddof: int = 1,
    eps: float = 1e-8,
    min_spread: float = 1e-6,
    clamp: float = 5.0,
) -> Credit:
    """BranchGRPO: compare an edge with the other edges of its prompt at its depth.  arXiv:2509.06040

    Mean fusion: an edge is worth the mean of the leaves below it. Z-score over the distinct edges of a depth; 0 where
    there is one edge or their std is below min_spread.
    """
    value, depth = tree_value(advantage, edge).flatten(), torch.arange(edge.shape[1])
    _, group = group.unique(return_inverse=True)
    level = (group[:, None] * edge.shape[1] + depth).flatten()
    once = torch.where(edge >= 0, 1 / edge_share(edge), 0).flatten()
    std = group_std(value, level, once, ddof=ddof)
    flat = (std < min_spread) | (group_spread(value, level, once) == 0)
    score = group_centre(value, level, once) / (std + eps)
    return torch.where(flat | (once == 0), 0, score).clamp(-clamp, clamp).view(edge.shape)
