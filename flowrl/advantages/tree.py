"""Spread a rollout's advantage over its decisions: (advantage [N], edge [N, T], ...) -> [N, T].

Credit is the last act: whatever clamps or multiplies per step happens here, never in `weight`.
Decisions that do not exist (edge -1) get 0.
log_prob_old [N, T] is what the rollout recorded of each transition, a mean over latent dims; nan where it was
determined, which counts as 0. Softmaxes of such means are nearly flat; a temperature below 1 sharpens them.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowrl.groups import group_centre, group_count, group_max, group_mean, group_spread, group_std

Advantage = Float[Tensor, " N"]
Edge = Int[Tensor, "N T"]
Group = Int[Tensor, " N"]
LogProb = Float[Tensor, "N T"]
Credit = Float[Tensor, "N T"]


def broadcast(advantage: Advantage, edge: Edge) -> Credit:
    """Every decision is credited with the outcome."""
    return torch.where(edge >= 0, advantage[:, None], 0)


def tree_value(advantage: Advantage, edge: Edge) -> Credit:
    """Value of an edge: mean advantage of the leaves below it."""
    return _value_below(advantage, edge, None)


def leaf_sum(advantage: Advantage, edge: Edge) -> Credit:
    """Sum of the advantages of the leaves below an edge.  arXiv:2601.00423

    E-GRPO's granularities: one jump, finished in steps of several lengths, each compared by itself.
    """
    return tree_value(advantage, edge) * edge_share(edge)


def path_softmax(advantage: Advantage, edge: Edge, log_prob_old: LogProb, *, beta: float = 1.0) -> Credit:
    """Value of an edge: leaves below it weighed by softmax(beta * log-prob of the path to them).  arXiv:2509.06040

    BranchGRPO's path-probability fusion; beta 0 is tree_value.
    """
    steps = _drawn_only(log_prob_old)
    onward = steps.flip(1).cumsum(1).flip(1) - steps  # from the state that an edge reaches to the leaf
    score, flat = (beta * onward).flatten(), edge.flatten()
    return _value_below(advantage, edge, (score - group_max(score, flat)).exp())


def edge_softmax(advantage: Advantage, edge: Edge, log_prob_old: LogProb, *, temperature: float = 1.0) -> Credit:
    """Value of an edge: its children's values by softmax(log-prob / temperature), from the leaves up.

    TreeGRPO's back-up, arXiv:2512.08153; fusion edge by edge in BranchGRPO's published code, arXiv:2509.06040. The
    temperature is OUR READING. A state with one child passes its value on.
    """
    score, share = _drawn_only(log_prob_old) / temperature, edge_share(edge)
    value, child, below = advantage, torch.zeros_like(advantage), torch.ones_like(share[:, 0])
    out = []
    for t in reversed(range(edge.shape[1])):
        here, exists = edge[:, t], edge[:, t] >= 0
        weight = (child - group_max(child, here)).exp() / below  # each distinct child once
        mean = torch.where(group_spread(value, here) > 0, group_mean(value, here, weight), value)
        value = torch.where(exists, mean, value)
        child, below = torch.where(exists, score[:, t], child), torch.where(exists, share[:, t], below)
        out.append(torch.where(exists, value, 0))
    return torch.stack(out[::-1], 1)


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
    return _depthwise(tree_value(advantage, edge), edge, group, ddof, eps, min_spread, clamp)


def tree_depthwise_by_path(
    advantage: Advantage,
    edge: Edge,
    group: Group,
    log_prob_old: LogProb,
    *,
    beta: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-8,
    min_spread: float = 1e-6,
    clamp: float = 5.0,
) -> Credit:
    """tree_depthwise with path_softmax in the place of the mean.  arXiv:2509.06040"""
    value = path_softmax(advantage, edge, log_prob_old, beta=beta)
    return _depthwise(value, edge, group, ddof, eps, min_spread, clamp)


def tree_depthwise_by_edge(
    advantage: Advantage,
    edge: Edge,
    group: Group,
    log_prob_old: LogProb,
    *,
    temperature: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-8,
    min_spread: float = 1e-6,
    clamp: float = 5.0,
) -> Credit:
    """tree_depthwise with edge_softmax in the place of the mean.  arXiv:2509.06040"""
    value = edge_softmax(advantage, edge, log_prob_old, temperature=temperature)
    return _depthwise(value, edge, group, ddof, eps, min_spread, clamp)


def _value_below(advantage, edge, weight):
    """Mean over the leaves below an edge, by their weights [N * T]; equal leaves give their very value."""
    each, flat = advantage[:, None].expand(edge.shape).flatten(), edge.flatten()
    value = torch.where(group_spread(each, flat) > 0, group_mean(each, flat, weight), each)
    return torch.where(edge >= 0, value.view(edge.shape), 0)


def _drawn_only(log_prob):
    """Steps that were determined have no log-prob and count as 0."""
    return torch.where(log_prob.isnan(), 0, log_prob)


def _depthwise(value, edge, group, ddof, eps, min_spread, clamp):
    """Z-score of the distinct edges of a depth within a group."""
    value, depth = value.flatten(), torch.arange(edge.shape[1])
    _, group = group.unique(return_inverse=True)
    level = (group[:, None] * edge.shape[1] + depth).flatten()
    once = torch.where(edge >= 0, 1 / edge_share(edge), 0).flatten()
    std = group_std(value, level, once, ddof=ddof)
    flat = (std < min_spread) | (group_spread(value, level, once) == 0)
    score = group_centre(value, level, once) / (std + eps)
    return torch.where(flat | (once == 0), 0, score).clamp(-clamp, clamp).view(edge.shape)
