"""Which decisions are trained: (noisy [N, T] 0/1, ...) -> mask [N, T] 0/1."""

import torch
from jaxtyping import Float
from torch import Tensor

Mask = Float[Tensor, "N T"]


def drawn(noisy: Mask) -> Mask:
    """Every decision that was drawn at random."""
    return noisy


def everything(noisy: Mask) -> Mask:
    """Every decision, drawn or not: what forward-process methods train is noised again anyway."""
    return torch.ones_like(noisy)


def preferred(noisy: Mask, advantage: Float[Tensor, " N"]) -> Mask:
    """All decisions of the rollouts whose advantage is not 0: the winners and losers of pairs.  arXiv:2311.12908"""
    return torch.ones_like(noisy) * (advantage != 0)[:, None]


def random_steps(noisy: Mask, generator: torch.Generator, *, fraction: float = 0.6) -> Mask:
    """Per rollout, int(fraction * drawn decisions) of them, at least one, in a random draw.  arXiv:2505.07818"""
    order = torch.rand(noisy.shape, generator=generator)
    rank = torch.where(noisy > 0, order, 2.0).argsort(1).argsort(1)
    count = (fraction * noisy.sum(1, keepdim=True) + 1e-6).floor().clamp(min=1)
    return noisy * (rank < count)
