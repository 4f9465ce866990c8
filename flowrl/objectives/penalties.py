"""Terms that hold the policy back: ... -> [B, K], 0 for equal policies.  A coefficient belongs to one of them.

kl_gaussian and kl_mean_over_s2 differ by the factor |dt| of the step: a coefficient of one is wrong for the other.
"""

from jaxtyping import Float
from torch import Tensor

BK = Float[Tensor, "B K"]
Scalar = Float[Tensor, ""]
Latents = Float[Tensor, "B K *L"]


def kl_gaussian(mean: Latents, mean_ref: Latents, std: BK) -> BK:
    """KL of the step's Gaussian to the reference's: mean((mean - mean_ref)^2) / (2 std^2), nats per latent dim."""
    return mean_mse(mean, mean_ref) / (2 * std**2)


def kl_mean_over_s2(mean: Latents, mean_ref: Latents, std: BK, sigma: BK, sigma_next: BK) -> BK:
    """Flow-GRPO's KL: divides by the diffusion s^2 = std^2 / |dt| instead of std^2.  arXiv:2505.05470"""
    return mean_mse(mean, mean_ref) / (2 * std**2) * (sigma - sigma_next)


def kl_anchor_adaptive(mean: Latents, mean_anchor: Latents, std: BK, coefficient: Scalar, *, eps: float = 1e-6) -> BK:
    """SAGE-GRPO's moving anchor: coefficient * mean((mean - mean_anchor)^2) / (2 (std^2 + eps)).  arXiv:2603.21872

    coefficient is that of memory.trackers.adaptive_coefficient; the anchor is copied every 10 updates.
    """
    return coefficient * mean_mse(mean, mean_anchor) / (2 * (std**2 + eps))


def log_prob_drop_adaptive(log_prob: BK, log_prob_old: BK, coefficient: Scalar) -> BK:
    """SAGE-GRPO's stepwise term: coefficient * (log_prob_old - log_prob); negative where it rose.  arXiv:2603.21872"""
    return coefficient * (log_prob_old - log_prob)


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


def best_path_mse(velocity: Latents, best_velocity: Latents, best_advantage: BK) -> BK:
    """LayerTuning-RL: pull every node's velocity to that of the group's best path at its step.  arXiv:2509.23352

    mean((velocity - best_velocity)^2), times the sigmoid of how much better the best is (memory.trackers.best_path);
    -inf: nothing to imitate. The factor is OUR READING.
    """
    return best_advantage.sigmoid() * velocity_mse(velocity, best_velocity)
