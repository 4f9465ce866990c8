"""Sigma grids [T+1], falling from 1 to 0.  A pipeline's own grid comes from its adapter; these are the pure ones."""

import torch
from jaxtyping import Float
from torch import Tensor


def linear(steps: int) -> Float[Tensor, " T1"]:
    """Evenly spaced from 1 to 0."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}.")
    return torch.linspace(1, 0, steps + 1)


def shifted(sigmas: Float[Tensor, " T1"], *, shift: float) -> Float[Tensor, " T1"]:
    """Time shift s sigma / (1 + (s-1) sigma): shift > 1 spends more steps at high noise; 1 changes nothing."""
    if shift <= 0:
        raise ValueError(f"shift must be positive, not {shift}.")
    return shift * sigmas / (shift * sigmas + (1 - sigmas))  # the ends stay exactly 1 and 0


def check(sigmas: Float[Tensor, " T1"]) -> Float[Tensor, " T1"]:
    """The grid itself, if it can be denoised along: fp32, strictly falling, at most 1, ending at 0."""
    if sigmas.dtype != torch.float32:
        raise ValueError(f"sigmas must be float32, not {sigmas.dtype}: log-probs drift otherwise.")
    if not bool((sigmas[1:] < sigmas[:-1]).all()) or float(sigmas[0]) > 1 or float(sigmas[-1]) != 0:
        raise ValueError(f"sigmas must fall strictly from at most 1 to exactly 0, not {sigmas.tolist()}.")
    return sigmas
