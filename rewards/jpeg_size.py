"""Minus the kilobytes (1000 bytes) of the image as a JPEG, so plain images score high.  DDPO, arXiv:2305.13301"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.media import jpeg_bytes


def load(device: str | torch.device = "cpu", *, quality: int = 95) -> Callable:
    """`quality` is JPEG's, 1..100.  It runs on the CPU whatever the device."""
    if quality not in range(1, 101):
        raise ValueError(f"reward 'jpeg_size': quality is {quality!r}; expected a whole number from 1 to 100")

    def score(images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, " N"]:
        return torch.tensor([-len(jpeg_bytes(image, quality)) / 1000 for image in images])

    return score
