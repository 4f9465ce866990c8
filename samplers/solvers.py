"""Deterministic multi-step solvers, for evaluation and for rollouts that need no noise.

DPM-Solver++ on flows: alpha = 1 - sigma, lambda = log alpha - log sigma, h = lambda_next - lambda; it works on the
clean estimate x0 = latents - sigma * velocity.  arXiv:2211.01095
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor


def first_order(
    latents: Float[Tensor, "B *L"], x0: Float[Tensor, "B *L"], sigma: Tensor, sigma_next: Tensor
) -> Float[Tensor, "B *L"]:
    """sigma'/sigma * latents - alpha' (exp(-h) - 1) x0, written without exp: the same as one Euler (ODE) step."""
    ratio = sigma_next / sigma
    return ratio * latents + ((1 - sigma_next) - (1 - sigma) * ratio) * x0


def second_order(
    latents: Float[Tensor, "B *L"],
    x0: Float[Tensor, "B *L"],
    x0_before: Float[Tensor, "B *L"],
    sigma_before: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
) -> Float[Tensor, "B *L"]:
    """Midpoint two-step update; x0_before is the clean estimate at sigma_before > sigma > sigma_next > 0.

    At sigma_before = 1 lambda is -inf and the update is the first-order one.
    """
    h, h_before = _lambda(sigma_next) - _lambda(sigma), _lambda(sigma) - _lambda(sigma_before)
    slope = (x0 - x0_before) * (h / h_before)
    factor = (1 - sigma_next) - (1 - sigma) * sigma_next / sigma  # -alpha' (exp(-h) - 1)
    return first_order(latents, x0, sigma, sigma_next) + 0.5 * factor * slope


@torch.no_grad()
def dpm_solver(
    velocity: Callable, latents: Float[Tensor, "B *L"], prompt: Int[Tensor, " B"], sigmas: Float[Tensor, " T1"]
) -> Float[Tensor, "B *L"]:
    """Denoise along `sigmas` with DPM-Solver++ (2M): first order on the first and the last step, second between."""
    sigmas = sigmas.to(latents.device)
    last, before = len(sigmas) - 2, None
    for t in range(last + 1):
        sigma, sigma_next = sigmas[t], sigmas[t + 1]
        x0 = latents - sigma * velocity(latents, sigma.expand(len(latents)), prompt)
        if before is None or t == last:
            latents = first_order(latents, x0, sigma, sigma_next)
        else:
            latents = second_order(latents, x0, before, sigmas[t - 1], sigma, sigma_next)
        before = x0
    return latents


def _lambda(sigma: Tensor) -> Tensor:
    return torch.log1p(-sigma) - sigma.log()
