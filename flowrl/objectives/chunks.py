"""Consecutive steps trained as one: -> chunk [T], the number of the chunk a step belongs to, -1 for none.

The last step ends at sigma = 0, draws no noise and belongs to none.  Chunk-GRPO.  arXiv:2510.21583
change [N, T] is how far a step moved the latents, relative to their size; its curve hardly depends on the prompt.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

Chunk = Int[Tensor, " T"]


def fixed(steps: int, *, sizes: Sequence[int] = (2, 3, 4, 7)) -> Chunk:
    """Chunks of these sizes, noise first.  Published: 2, 3, 4, 7 of 17 steps."""
    if min(sizes, default=0) < 1 or sum(sizes) != steps - 1:
        raise ValueError(
            f"chunks of {list(sizes)} steps, {sum(sizes)} in all: {steps} steps have {steps - 1} that draw noise. Set "
            "sizes that sum to that, each 1 or more."
        )
    number = torch.arange(len(sizes)).repeat_interleave(torch.tensor(list(sizes)))
    return torch.cat([number, number.new_tensor([-1])])


def by_change(change: Float[Tensor, "N T"], *, longest: int = 7) -> Chunk:
    """Cut where the curve of the mean change turns: where its differences change sign.

    What is longer than `longest` (OUR READING) is cut again where its second differences do, and so on; in the middle
    where they never do.
    """
    curve = change.mean(0)[:-1]
    return fixed(len(curve) + 1, sizes=_cut(curve, 0, len(curve), 1, longest))


def relative_change(latents: Float[Tensor, "B K *L"], next_latents: Float[Tensor, "B K *L"]) -> Float[Tensor, "B K"]:
    """L1 norm of what a step changed over that of what it started from."""
    size = latents.abs().flatten(2).mean(2)
    return (next_latents - latents).abs().flatten(2).mean(2) / size


def _cut(curve, start, stop, order, longest):
    """Sizes of the pieces of curve[start:stop], cut where differences of this order change sign."""
    if order > 1 and stop - start <= longest:
        return [stop - start]
    sign = curve[start:stop].diff(n=order).sign()
    turns = (sign[1:] * sign[:-1] < 0).nonzero().flatten() + order  # differences of order n span n + 1 steps
    cuts = [start, *(start + turns).tolist(), stop]
    if len(cuts) == 2:
        if stop - start <= longest:
            return [stop - start]
        cuts.insert(1, (start + stop) // 2)
    return [size for low, high in pairwise(cuts) for size in _cut(curve, low, high, order + 1, longest)]
