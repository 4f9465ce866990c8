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


def velocity_mse_anchor(velocity: Latents, velocity_anchor: Latents) -> BK:
    """velocity_mse to a second snapshot, one that follows the policy.  arXiv:2509.25050"""
    return velocity_mse(velocity, velocity_anchor)


def velocity_mse_of_good(
    velocity: Latents, velocity_ref: Latents, advantage: BK, *, largest: float = 5.0, least: float = 1e-3
) -> BK:
    """velocity_mse times least + (1 - least) * (advantage / largest + 1) / 2.  arXiv:2603.14128

    What scored well is held to the reference, what scored badly is free to leave it.
    """
    share = (advantage / largest / 2 + 0.5).clamp(0, 1)
    return velocity_mse(velocity, velocity_ref) * (least + share * (1 - least))


def x0_mse_old(velocity: Latents, velocity_old: Latents, sigma: BK) -> BK:
    """mean((x0 - x0_old)^2) of the clean estimates at one state: sigma^2 * velocity_mse.  arXiv:2604.23380"""
    return sigma**2 * velocity_mse(velocity, velocity_old)
