"""Sigma grids [T+1], falling from 1 to 0.  A pipeline's own grid comes from its adapter; these are the pure ones."""

import torch
from jaxtyping import Float
from torch import Tensor


def linear(steps: int) -> Float[Tensor, " T1"]:
    """Evenly spaced from 1 to 0."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}.")
    return torch.linspace(1, 0, steps + 1)


def shifted(sigmas: Float[Tensor, "*T1"], *, shift: float) -> Float[Tensor, "*T1"]:
    """Time shift s sigma / (1 + (s-1) sigma): shift > 1 spends more steps at high noise; 1 changes nothing."""
    if shift <= 0:
        raise ValueError(f"shift must be positive, not {shift}.")
    return shift * sigmas / (shift * sigmas + (1 - sigmas))  # the ends stay exactly 1 and 0


def compressed(sigmas: Float[Tensor, " T1"], after: int, *, share: float = 0.4) -> Float[Tensor, " M1"]:
    """The grid with the N steps from index `after` on replaced by max(int(share * N), 1).  arXiv:2507.21802

    Evenly spaced in the index, which on a shifted grid is evenly before the shift, as MixGRPO-Flash finishes its
    rollouts. Level i of T is taken for 1 - i / T under a shift of its own, which is read off the grid and, between two
    levels, log-linear: one number on a shifted grid; for others, such as SD3's, that is OUR READING.
    """
    steps = len(sigmas) - 1
    if not 0 <= after < steps or not 0 < share <= 1:
        raise ValueError(
            f"a grid of {steps} steps compressed to {share} after step {after}: expected a share above 0 and at most "
            f"1, and a step of 0..{steps - 1}."
        )
    count = max(int(share * (steps - after) + 1e-6), 1)
    index = torch.arange(1, steps, dtype=sigmas.dtype, device=sigmas.device)
    own = sigmas[1:-1].logit() - (1 - index / steps).logit()  # the log of each level's shift; the ends have none
    place = after + (steps - after) * torch.arange(1, count, dtype=sigmas.dtype, device=sigmas.device) / count
    at = (place - 1).clamp(0, steps - 2)
    low = at.long()
    shift = own[low].lerp(own[(low + 1).clamp(max=steps - 2)], at - low)
    inner = ((1 - place / steps).logit() + shift).sigmoid()
    return torch.cat([sigmas[: after + 1], inner, sigmas[-1:]])


def check(sigmas: Float[Tensor, " T1"]) -> Float[Tensor, " T1"]:
    """The grid itself, if it can be denoised along: fp32, strictly falling, at most 1, ending at 0."""
    if sigmas.dtype != torch.float32:
        raise ValueError(f"sigmas must be float32, not {sigmas.dtype}: log-probs drift otherwise.")
    if not bool((sigmas[1:] < sigmas[:-1]).all()) or float(sigmas[0]) > 1 or float(sigmas[-1]) != 0:
        raise ValueError(f"sigmas must fall strictly from at most 1 to exactly 0, not {sigmas.tolist()}.")
    return sigmas
