"""One denoising step as a Gaussian: (latents, velocity, sigma, sigma_next) -> (mean, std).

Convention, everywhere in this package: sigma falls from 1 (noise) to 0 (data),
latents = (1 - sigma) * x0 + sigma * noise and velocity = noise - x0.
`latents` and `velocity` are [B, *L]; `sigma` and `sigma_next` are scalars or [B]. The mean has the shape of the
latents, the std that of sigma, and std already holds sqrt(dt): it is the standard deviation of the step.
A kernel never samples and never touches a network. Its mean is linear in latents and velocity, and nothing asks that
sigma_next be the next level of a schedule: any kernel may jump over some.
One that needs the schedule asks by name for `sigmas` [T+1], `step` (its index), `steps` (T) or `depth` (noisy steps
before it); `bind` fills them in. All arithmetic is fp32 or better: bf16 rounds sigma to 1 and the log-prob to noise.
"""

import inspect
import math
from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

Latents = Float[Tensor, "B *L"]
Sigma = Float[Tensor, "*#B"]
Kernel = Callable[[Latents, Latents, Sigma, Sigma], tuple[Latents, Sigma]]


def ode(latents: Latents, velocity: Latents, sigma: Sigma, sigma_next: Sigma):
    """Deterministic Euler step; std = 0, so it has no log-prob."""
    dt = sigma_next - sigma
    return latents + spread(dt, latents) * velocity, torch.zeros_like(dt)


def flow_sde(
    latents: Latents,
    velocity: Latents,
    sigma: Sigma,
    sigma_next: Sigma,
    sigmas: Float[Tensor, " T1"],
    *,
    eta: float = 0.7,
):
    """Marginal-preserving SDE with diffusion eta * sqrt(sigma / (1 - sigma)), eq. 9.  arXiv:2505.05470

    mean = latents (1 + eta^2 dt / 2(1-sigma)) + velocity (1 + eta^2/2) dt.  The diffusion is infinite at sigma = 1;
    there 1 - sigma is taken at the schedule's second level, `sigmas[1]` (also where a schedule starts at 0.999999).
    """
    return _flow_step(latents, velocity, sigma, sigma_next, sigmas, eta)


def growing_sde(
    latents: Latents,
    velocity: Latents,
    sigma: Sigma,
    sigma_next: Sigma,
    sigmas: Float[Tensor, " T1"],
    depth: Int[Tensor, "*#B"],
    *,
    eta: float = 0.7,
    growth: float = 0.5,
    levels: int = 4,
):
    """flow_sde whose eta grows with the depth in a tree: eta (1 + growth * depth / levels).  arXiv:2509.23352

    Dynamic-TreeRPO; the linear form and its numbers are OUR READING.
    """
    return _flow_step(latents, velocity, sigma, sigma_next, sigmas, eta * (1 + growth * depth / levels))


def dance_sde(latents: Latents, velocity: Latents, sigma: Sigma, sigma_next: Sigma, *, eta: float = 0.3):
    """Constant-noise reverse SDE: d(latents) = (velocity - eta^2/2 * score) d(sigma) + eta dw.  arXiv:2505.07818"""
    dt = sigma_next - sigma
    return _reverse_sde(latents, velocity, sigma, dt, torch.full_like(dt, eta))


def linear_sde(
    latents: Latents,
    velocity: Latents,
    sigma: Sigma,
    sigma_next: Sigma,
    sigmas: Float[Tensor, " T1"],
    *,
    eta: float = 1.0,
):
    """Marginal-preserving SDE with diffusion eta * sigmas[1] * sigma: Flow-GRPO on Wan 2.1.  arXiv:2505.05470

    Its published form has no eta, which is 1.
    """
    return _reverse_sde(latents, velocity, sigma, sigma_next - sigma, eta * sigmas[1] * sigma)


def cps(latents: Latents, velocity: Latents, sigma: Sigma, sigma_next: Sigma, *, eta: float = 0.8):
    """Coefficients-preserving sampling: std = sigma_next * sin(eta pi / 2).  arXiv:2509.05952

    Keeps the weights of x0 and of the total noise, not the marginal: on Gaussian data of std 0.5 four hundred steps at
    eta 0.7 end at std 0.42, and more steps do not mend it. eta = 0 is the ODE, eta = 1 draws the noise afresh.
    """
    eta = _share("cps", eta)
    return _redrawn(latents, velocity, sigma, sigma_next, sigma_next * math.sin(eta * math.pi / 2))


def ddim(latents: Latents, velocity: Latents, sigma: Sigma, sigma_next: Sigma, *, eta: float = 1.0):
    """DDIM(eta) of a variance-preserving model, seen as a flow.  arXiv:2010.02502, with eta 1 that of DDPO 2305.13301

    With a the cumulative alpha, sigma = sqrt(1-a) / (sqrt(a) + sqrt(1-a)) and latents are divided by that sum, which
    the pipeline does. Then eta sqrt((1-a')/(1-a) (1-a/a')) is std = eta sigma' sqrt(1 - r^2), r the noise-to-signal
    ratio of sigma_next over that of sigma; the mean is that of cps. At sigma_next = 0 std is 0.
    """
    eta = _share("ddim", eta)
    falls = (sigma - sigma_next) / (sigma * (1 - sigma_next))  # 1 - r, without cancellation
    return _redrawn(latents, velocity, sigma, sigma_next, eta * sigma_next * (falls * (2 - falls)).sqrt())


def ddim_sde(
    latents: Latents, velocity: Latents, sigma: Sigma, sigma_next: Sigma, *, eta: float = 0.7, literal: bool = False
):
    """Stepwise-Flow-GRPO's DDIM-like SDE: the form of cps with std = eta sigma_next sqrt(sigma).  arXiv:2603.28718

    Its noise is largest at sigma = 1 and vanishes towards the picture, as the text says. literal: sqrt(1 - sigma), as
    the formula is printed, which has none at sigma = 1. The choice, and eta, are OUR READING.
    """
    eta = _share("ddim_sde", eta)
    at = 1 - sigma if literal else sigma
    return _redrawn(latents, velocity, sigma, sigma_next, eta * sigma_next * at.sqrt())


def sage(
    latents: Latents, velocity: Latents, sigma: Sigma, sigma_next: Sigma, *, eta: float = 0.5, guard: float = 3e-3
):
    """SAGE-GRPO's SDE: Flow-SDE with its variance integrated over the step.  arXiv:2603.21872

    std^2 = eta^2 (dt + log((1-sigma')/(1-sigma))), the integral of eta^2 u/(1-u); less than the left end's value.
    1 - sigma is at least `guard`, and where sigma_next is near 1 as well, half of 1 - sigma' (OUR READING: else nothing
    would be drawn on the first step of a fine grid).
    """
    dt, left = sigma_next - sigma, 1 - sigma_next
    variance = eta**2 * (dt + (left / torch.maximum(1 - sigma, (left / 2).clamp(max=guard))).log())
    score = _score(latents, velocity, sigma)
    mean = latents + spread(dt, latents) * velocity + 0.5 * spread(variance, latents) * score
    return mean, variance.sqrt()


def _flow_step(latents, velocity, sigma, sigma_next, sigmas, eta):
    """Flow-SDE with a number or a number per row as its eta."""
    diffusion = eta * (sigma / (1 - torch.minimum(sigma, sigmas[1]))).sqrt()
    return _reverse_sde(latents, velocity, sigma, sigma_next - sigma, diffusion)


def _share(kernel, eta):
    """eta, where it says how much of the noise at sigma_next is drawn afresh."""
    if not 0 <= eta <= 1:
        raise ValueError(f"{kernel}: eta = {eta} is no share of the noise: expected 0 to 1.")
    return eta


def _redrawn(latents, velocity, sigma, sigma_next, std):
    """The clean estimate noised to sigma_next again, of which a part of the given std is drawn afresh."""
    x0 = latents - spread(sigma, latents) * velocity
    noise = latents + spread(1 - sigma, latents) * velocity
    kept = (sigma_next**2 - std**2).clamp(min=0).sqrt()  # below 0 by rounding alone
    return spread(1 - sigma_next, latents) * x0 + spread(kept, latents) * noise, std


def _reverse_sde(latents, velocity, sigma, dt, diffusion):
    """Euler-Maruyama step of the reverse SDE with the given diffusion coefficient."""
    score = _score(latents, velocity, sigma)
    drift = velocity - 0.5 * spread(diffusion, latents) ** 2 * score
    return latents + drift * spread(dt, latents), diffusion * (-dt).sqrt()


def _score(latents, velocity, sigma):
    """Gradient of the log-density of the latents at this level: minus the noise estimate over sigma."""
    return -(latents + spread(1 - sigma, latents) * velocity) / spread(sigma, latents)


def spread(value: Tensor, latents: Tensor) -> Tensor:
    """Give a number per row, [B] or a scalar, the trailing dims that broadcast it over [B, *L]."""
    return value.reshape(value.shape + (1,) * (latents.ndim - value.ndim)) if value.ndim else value


def bind(kernel: Callable, **schedule) -> Kernel:
    """Fill in what `kernel` asks for by name besides its four arguments, out of `schedule` (such as sigmas)."""
    asked = inspect.signature(kernel).parameters
    return partial(kernel, **{name: value for name, value in schedule.items() if name in asked})


def scales(
    kernel: Callable, sigmas: Float[Tensor, " T1"], **schedule
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """(std, slope) of every step of a schedule; slope: d mean / d velocity, a number as the mean is linear in it."""
    step = torch.arange(len(sigmas) - 1)
    nothing = sigmas.new_zeros(len(step), 1)
    bound = bind(kernel, sigmas=sigmas, step=step, steps=len(step), **schedule)
    slope, std = bound(nothing, nothing + 1, sigmas[:-1], sigmas[1:])
    return std, slope[:, 0]
