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


def chunk_mean(mask: Mask, chunk: Int[Tensor, " T"]) -> Mask:
    """Every trained chunk of every rollout counts the same, evenly over its decisions.  arXiv:2510.21583"""
    each = torch.zeros_like(mask)
    for number in chunk[mask.any(0)].unique().tolist():
        if number < 0:
            raise ValueError("chunk_mean: a decision that belongs to no chunk is trained. Set select = random_chunks.")
        here = mask * (chunk == number)
        each = each + here / here.sum(1, keepdim=True).clamp(min=1)
    return each / each.sum().clamp(min=1)
