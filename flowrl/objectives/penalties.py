"""Terms that hold the policy back: ... -> [B, K], 0 for equal policies.  A coefficient belongs to one of them.

kl_gaussian and kl_mean_over_s2 differ by the factor |dt| of the step: a coefficient of one is wrong for the other.
"""

from jaxtyping import Float
from torch import Tensor

BK = Float[Tensor, "B K"]
Latents = Float[Tensor, "B K *L"]


def kl_gaussian(mean: Latents, mean_ref: Latents, std: BK) -> BK:
    """KL of the step's Gaussian to the reference's: mean((mean - mean_ref)^2) / (2 std^2), nats per latent dim."""
    return mean_mse(mean, mean_ref) / (2 * std**2)


def kl_mean_over_s2(mean: Latents, mean_ref: Latents, std: BK, sigma: BK, sigma_next: BK) -> BK:
    """Flow-GRPO's KL: divides by the diffusion s^2 = std^2 / |dt| instead of std^2.  arXiv:2505.05470"""
    return mean_mse(mean, mean_ref) / (2 * std**2) * (sigma - sigma_next)


def mean_mse(mean: Latents, mean_ref: Latents) -> BK:
    """mean((mean - mean_ref)^2): finite where std is 0, the form that goes with CPS.  arXiv:2509.05952"""
    return ((mean - mean_ref) ** 2).flatten(2).mean(2)


def velocity_mse(velocity: Latents, velocity_ref: Latents) -> BK:
    """mean((velocity - velocity_ref)^2): the same weight at every step.  arXiv:2509.16117"""
    return ((velocity - velocity_ref) ** 2).flatten(2).mean(2)
