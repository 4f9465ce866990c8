"""What the loop needs to know of other processes, and how it keeps step with them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.visual.policy import Policy, uncounted


@dataclass(frozen=True)
class Ranks:
    """What the loop needs to know of other processes: where this one's rows lie, and how to see everybody's."""

    index: int = 0
    count: int = 1
    gather: Callable[[Tensor], Tensor] = lambda rows: rows  # [n, ...] of this rank -> [sum of n, ...], in rank order
    agree: Callable[[int], int] = lambda count: count  # calls here -> calls of every rank, where weights are shared out

    def share(self, items: Sequence) -> tuple[int, Sequence]:
        """(position of the first, this rank's contiguous slice): in rank order the slices make up the whole."""
        bounds = [len(items) * r // self.count for r in (self.index, self.index + 1)]
        return bounds[0], items[bounds[0] : bounds[1]]

    def place(self, rows: Tensor) -> tuple[Tensor, slice]:
        """(the rows of all ranks, which of them are this rank's)."""
        counts = self.gather(torch.tensor([len(rows)]))
        start = int(counts[: self.index].sum())
        return self.gather(rows), slice(start, start + len(rows))


def in_step(policy: Policy, ranks: Ranks, roots: int, batch_size: int | None) -> Callable:
    """policy.velocity in batches of `batch_size` rows, as many of them as the rank with the most roots makes.

    Where ranks have to agree, what is missing is one row that is seen once more, and that nobody counts.
    """
    most = ranks.agree(roots)

    def velocity(latents: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
        longest = len(latents) * most // roots  # rows there: as many for every root
        size = batch_size or longest
        chunks = list(zip(*(x.split(size) for x in (latents, sigma, prompt)), strict=True))
        out = [policy.velocity(*chunk) for chunk in chunks]
        with uncounted(policy):
            for _ in range(-(-longest // size) - len(chunks)):
                policy.velocity(latents[:1], sigma[:1], prompt[:1])
        return out[0] if len(out) == 1 else torch.cat(out)

    return velocity


def is_spare(rows: Mapping[str, Tensor]) -> bool:
    """Whether a micro-batch is the row that only keeps step."""
    return int(rows["call"][0, 0]) < 0
