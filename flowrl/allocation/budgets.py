"""Which prompts of `count` an update rolls out, and how many rollouts each gets: -> (prompts, roots of each).

Pure functions; memory is passed in. roots is the largest number of rollouts, what a run is planned with.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowrl.allocation.prompts import by_weight
from flowrl.memory.trackers import expected_reward


def by_expected(
    count: int,
    per_update: int,
    roots: int,
    generator: torch.Generator,
    memory: Mapping[str, Tensor],
    *,
    fewer: Sequence[int] = (3, 2, 1, 0),
) -> tuple[list[int], list[int]]:
    """SuperFlow: prompts drawn by how uncertain their reward is, with fewer rollouts where it is not.  arXiv:2512.17951

    Four bins of uncertainty, from none to the most there can be, get roots - fewer rollouts: of 24 the published 21 to
    24. Goes with track = beta_counts.
    """
    weight = uncertainty(expected_reward(torch.arange(count), memory))
    chosen = by_weight(weight, per_update, generator)
    sizes = by_uncertainty(weight[chosen], sizes=[roots - less for less in fewer])
    return chosen, sizes.tolist()


def uncertainty(expected: Float[Tensor, " P"], *, eps: float = 1e-6) -> Float[Tensor, " P"]:
    """sqrt(v (1 - v) + eps) of an expected reward v in [0, 1]: most at 1/2.  SuperFlow.  arXiv:2512.17951"""
    return (expected * (1 - expected) + eps).sqrt()


def by_uncertainty(uncertainty: Float[Tensor, " P"], *, sizes: Sequence[int] = (21, 22, 23, 24)) -> Int[Tensor, " P"]:
    """Bigger groups where the outcome is less certain, in len(sizes) bins.  SuperFlow.  arXiv:2512.17951

    Bins of equal width from 0 to 1/2, the most there can be, are OUR READING: a prompt's size depends on itself alone.
    """
    if min(sizes, default=0) < 2:
        raise ValueError(f"group sizes {list(sizes)}: expected one or more, each of 2 or more.")
    bins = (uncertainty / 0.5 * len(sizes)).long().clamp(max=len(sizes) - 1)
    return torch.tensor(list(sizes))[bins]
