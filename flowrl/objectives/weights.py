"""How much each decision counts: (mask [N, T], ...) -> weight [N, T], summing to 1 over all ranks.

Fixed on the global table before anything is split, so that micro-batches and processes cannot change the gradient.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowrl.advantages.tree import edge_share

Mask = Float[Tensor, "N T"]


def token_mean(mask: Mask) -> Mask:
    """Every decision of every rollout counts the same.  arXiv:2503.14476"""
    return mask / mask.sum().clamp(min=1)


def edge_mean(mask: Mask, edge: Int[Tensor, "N T"]) -> Mask:
    """Every distinct transition counts the same, however many leaves share it.  arXiv:2509.06040"""
    once = mask / edge_share(torch.where(mask > 0, edge, -1))
    return once / once.sum().clamp(min=1)
