"""Which decisions are trained: (noisy [N, T] 0/1, ...) -> mask [N, T] 0/1.

What is left out loses its gradient alone: rewards and advantages are those of all rollouts.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowrl.advantages.tree import edge_share
from flowrl.groups import group_count, group_rank

Mask = Float[Tensor, "N T"]
Advantage = Float[Tensor, " N"]
Edge = Int[Tensor, "N T"]
Group = Int[Tensor, " N"]
Chunk = Int[Tensor, " T"]


def drawn(noisy: Mask) -> Mask:
    """Every decision that was drawn at random."""
    return noisy


def everything(noisy: Mask) -> Mask:
    """Every decision, drawn or not: what forward-process methods train is noised again anyway."""
    return torch.ones_like(noisy)


def preferred(noisy: Mask, advantage: Float[Tensor, " N"]) -> Mask:
    """All decisions of the rollouts whose advantage is not 0: the winners and losers of pairs.  arXiv:2311.12908"""
    return torch.ones_like(noisy) * (advantage != 0)[:, None]


def kept(noisy: Mask, advantage: Advantage) -> Mask:
    """The drawn decisions of the rollouts whose advantage is not 0: those in conflict left out.  arXiv:2606.16771"""
    return noisy * (advantage != 0)[:, None]


def random_steps(noisy: Mask, generator: torch.Generator, *, fraction: float = 0.6) -> Mask:
    """Per rollout, int(fraction * drawn decisions) of them, at least one, in a random draw.  arXiv:2505.07818"""
    order = torch.rand(noisy.shape, generator=generator)
    rank = torch.where(noisy > 0, order, 2.0).argsort(1).argsort(1)
    count = (fraction * noisy.sum(1, keepdim=True) + 1e-6).floor().clamp(min=1)
    return noisy * (rank < count)


def random_chunks(noisy: Mask, chunk: Chunk, generator: torch.Generator, *, fraction: float = 0.5) -> Mask:
    """Per rollout int(fraction * chunks) of them, at least one, in a random draw.  Chunk-GRPO.  arXiv:2510.21583"""
    even = torch.ones(len(noisy), int(chunk.max()) + 1)
    return _of_chunks(noisy, chunk, even, generator, fraction)


def weighted_chunks(
    noisy: Mask, chunk: Chunk, change: Float[Tensor, "N T"], generator: torch.Generator, *, fraction: float = 0.5
) -> Mask:
    """random_chunks, drawn without replacement with a probability proportional to their mean change.

    change [N, T] is that of objectives.chunks.relative_change.  arXiv:2510.21583
    """
    mean = [change[:, chunk == number].mean(1) for number in range(int(chunk.max()) + 1)]
    return _of_chunks(noisy, chunk, torch.stack(mean, 1), generator, fraction)


def depth_pruned(
    noisy: Mask, iteration: int, *, first: int = 15, count: int = 4, every: int = 30, stop: int = 9
) -> Mask:
    """Leave out the transitions to `count` depths of a tree, a window that slides up.  BranchGRPO.  arXiv:2509.06040

    At first those that reach depths first..first+count-1 (step t reaches depth t + 1); every `every` iterations one
    depth nearer to the noise, until the window begins at `stop` (OUR READING of the end).
    """
    top = max(first - iteration // every, min(stop, first))
    depth = torch.arange(noisy.shape[1]) + 1
    return noisy * ((depth < top) | (depth >= top + count))


def parent_top(noisy: Mask, edge: Edge, group: Group, advantage: Advantage, *, share: float = 0.5) -> Mask:
    """Of the leaves of each last split keep the better share, at least one, after it.  BranchGRPO's width pruning 1.

    What leads to the last split, and the split itself, stays.  arXiv:2509.06040
    """
    alone, branch = _below_last_split(edge, group)
    limit = (share * group_count(branch) + 1e-6).floor().clamp(min=1)
    return noisy * (~alone | (group_rank(advantage, branch) < limit)[:, None])


def extremes(noisy: Mask, edge: Edge, group: Group, advantage: Advantage, *, share: float = 0.25) -> Mask:
    """After the last split keep the best share and the worst share of a group, at least one of each.

    BranchGRPO's width pruning 2.  arXiv:2509.06040
    """
    alone, _ = _below_last_split(edge, group)
    limit = (share * group_count(group) + 1e-6).floor().clamp(min=1)
    ends = (group_rank(advantage, group) < limit) | (group_rank(-advantage, group) < limit)
    return noisy * (~alone | ends[:, None])


def _of_chunks(noisy, chunk, weight, generator, fraction):
    """The drawn decisions in int(fraction * chunks) chunks of every rollout, by weight [N, chunks]."""
    count = max(int(fraction * weight.shape[1] + 1e-6), 1)
    picked = torch.zeros_like(weight).scatter_(1, torch.multinomial(weight, count, generator=generator), 1.0)
    of_step = torch.where(chunk >= 0, picked[:, chunk.clamp(min=0)], 0)
    return noisy * of_step.to(noisy)


def _below_last_split(edge, group):
    """(whether a step comes after the last split of its leaf [N, T], id of that split's state [N])."""
    exists, step = edge >= 0, torch.arange(edge.shape[1])
    last = torch.where(exists & (edge_share(edge) > 1), step, -1).max(1).values
    own = exists & (step > last[:, None])
    alone = own & (own.cumsum(1) > 1)  # the first edge of its own is the split
    branch = edge.gather(1, last.clamp(min=0)[:, None])[:, 0]
    return alone, torch.where(last >= 0, branch, -1 - group)
