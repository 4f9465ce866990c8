"""What stands in for log_prob on the forward process: (velocity, x0, noise, sigma) -> elbo [B, K], higher is better.

Minus the flow-matching error, a mean over latent dims; target velocity: noise - x0. Up to a constant it bounds the
log-likelihood of x0, so differences of two policies at the same levels and noises are log-ratios.
"""

from jaxtyping import Float
from torch import Tensor

BK = Float[Tensor, "B K"]
Latents = Float[Tensor, "B K *L"]


def weighted(velocity: Latents, x0: Latents, noise: Latents, sigma: BK, *, power: float = 0.0) -> BK:
    """-sigma^power * mean((velocity - target)^2); power 0, 1, 2: uniform, t, t^2.  arXiv:2509.25050"""
    return -(sigma**power) * _error(velocity, x0, noise)


def huber(velocity: Latents, x0: Latents, noise: Latents, sigma: BK, *, eps: float = 1e-10) -> BK:
    """-sigma * (sqrt(error + eps) - sqrt(eps)): grows like the distance instead of its square.  arXiv:2509.25050"""
    return generalized_huber(velocity, x0, noise, sigma, power=0.5, eps=eps) / 2


def generalized_huber(
    velocity: Latents, x0: Latents, noise: Latents, sigma: BK, *, power: float = 0.25, eps: float = 1e-10
) -> BK:
    """-sigma / power * ((error + eps)^power - eps^power).  arXiv:2509.25050"""
    return -sigma / power * ((_error(velocity, x0, noise) + eps) ** power - eps**power)


def self_normalised(
    velocity: Latents, x0: Latents, noise: Latents, sigma: BK, *, power: float = 1.0, floor: float = 1e-5
) -> BK:
    """Squared error over the mean absolute error, detached: scales like an error, not its square.  arXiv:2604.23380

    Errors are those of sigma^power * (velocity - target); power 1: of the clean estimate, 0: of the velocity.
    """
    error = _over(sigma**power, velocity) * (velocity - (noise - x0))
    scale = error.detach().abs().flatten(2).mean(2).clamp(min=floor)
    return -(error**2).flatten(2).mean(2) / scale


def _error(velocity, x0, noise):
    return ((velocity - (noise - x0)) ** 2).flatten(2).mean(2)


def _over(per_row: Tensor, latents: Tensor) -> Tensor:
    """Give [B, K] the trailing dims of latents."""
    return per_row.reshape(per_row.shape + (1,) * (latents.ndim - 2))
