"""What a state on the way is scored by: (latents, sigma[, prompt, velocity]) -> (latents [B, *L], sigma [B])."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from samplers.kernels import spread


@torch.no_grad()
def clean_estimate(
    latents: Float[Tensor, "B *L"],
    sigma: Float[Tensor, " B"],
    prompt: Int[Tensor, " B"],
    velocity: Callable,
    *,
    substeps: int = 5,
) -> tuple[Float[Tensor, "B *L"], Float[Tensor, " B"]]:
    """The finished latents that states on the way would reach by `substeps` Euler steps.  arXiv:2603.28718

    What Stepwise-Flow-GRPO scores; 1 is the one-step estimate latents - sigma * velocity. That the steps are of one
    length is OUR READING.
    """
    if substeps < 1:
        raise ValueError(f"a clean estimate in {substeps} substeps: expected 1 or more.")
    length = sigma / substeps
    for i in range(substeps):
        step = velocity(latents, sigma - i * length, prompt)
        latents = latents - spread(length, latents) * step
    return latents, torch.zeros_like(sigma)


def as_drawn(
    latents: Float[Tensor, "B *L"], sigma: Float[Tensor, " B"]
) -> tuple[Float[Tensor, "B *L"], Float[Tensor, " B"]]:
    """The noisy latents themselves, for rewards that ask for `latents` and `sigma`: DRM.  https://github.com/jjaxonx/DRM"""
    return latents, sigma
