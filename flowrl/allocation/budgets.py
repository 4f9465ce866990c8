"""How many rollouts a prompt gets.  Pure functions; memory is passed in."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor


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
