"""Log-densities of a step: (next_latents, mean[, std]) -> log_prob [B].  The only place where they are written.

Always the mean over latent dims, in nats per dim: clip ranges of 1e-5 to 1e-3 belong to that convention.
Written for one leading dim: next_latents and mean [B, *L], std [B] or a scalar.
"""

import math

from jaxtyping import Float
from torch import Tensor

from samplers.kernels import spread


def gaussian(
    next_latents: Float[Tensor, "B *L"], mean: Float[Tensor, "B *L"], std: Float[Tensor, "*#B"]
) -> Float[Tensor, " B"]:
    """Log-density of N(mean, std^2) at next_latents; std must be positive."""
    std = spread(std, mean)
    square = ((next_latents - mean) / std) ** 2
    return (-0.5 * square - std.log() - 0.5 * math.log(2 * math.pi)).flatten(1).mean(1)


def squared_error(next_latents: Float[Tensor, "B *L"], mean: Float[Tensor, "B *L"]) -> Float[Tensor, " B"]:
    """Minus the squared distance to the mean: finite at std 0, on another scale than a density.  arXiv:2509.05952"""
    return -((next_latents - mean) ** 2).flatten(1).mean(1)


gaussian.normal = True  # what adds a KL of Gaussians to log-probs takes no other
