"""At which noise levels a finished picture is noised again: (draws, generator[, sigmas]) -> sigma [draws].

sigmas is the schedule of the rollout. `shift` is defined on sigma, s sigma / (1 + (s-1) sigma): more than 1 moves the
levels towards noise (implementations that shift progress instead move them towards the picture).
"""

from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from samplers.schedules import shifted

Sigmas = Float[Tensor, " T1"]
Drawn = Float[Tensor, " J"]


def uniform(
    draws: int, generator: torch.Generator, *, low: float = 0.0, high: float = 1.0, shift: float = 1.0
) -> Drawn:
    """Uniform between low and high, then shifted."""
    if not 0 <= low < high <= 1:
        raise ValueError(f"uniform noise levels between {low} and {high}: expected 0 <= low < high <= 1.")
    return shifted(low + (high - low) * torch.rand(draws, generator=generator), shift=shift)


def logit_normal(
    draws: int, generator: torch.Generator, *, mean: float = 0.0, std: float = 1.0, shift: float = 1.0
) -> Drawn:
    """The sigmoid of a normal variable: most levels lie in the middle.  arXiv:2403.03206"""
    if not std > 0:
        raise ValueError(f"logit-normal noise levels of std {std}: expected a positive one.")
    return shifted((mean + std * torch.randn(draws, generator=generator)).sigmoid(), shift=shift)


def discrete(
    draws: int, generator: torch.Generator, sigmas: Sigmas, *, first: int = 0, last: int = 0, shift: float = 1.0
) -> Drawn:
    """Different steps of the schedule, drawn among steps first..last-1 (last 0: all of them).  arXiv:2509.16117"""
    steps = _steps(sigmas, first, last or len(sigmas) - 1)
    if draws > len(steps):
        raise ValueError(f"{draws} different noise levels of {len(steps)} steps: draw at most {len(steps)}.")
    chosen = steps[torch.randperm(len(steps), generator=generator)[:draws]]
    return shifted(sigmas[chosen], shift=shift)


def stratified(
    draws: int,
    generator: torch.Generator,
    sigmas: Sigmas,
    *,
    first: int = 0,
    fraction: float = 1.0,
    shift: float = 1.0,
) -> Drawn:
    """The steps of the schedule cut into `draws` equal segments, one drawn from each.  arXiv:2604.23380

    Steps first..int(fraction * T)-1 take part (at least one step each); noisiest first.
    """
    steps = _steps(sigmas, first, int(fraction * (len(sigmas) - 1) + 1e-6))
    if draws > len(steps):
        raise ValueError(f"{draws} segments of {len(steps)} steps: draw at most {len(steps)}.")
    bounds = [len(steps) * j // draws for j in range(draws + 1)]
    chosen = [int(torch.randint(low, high, (), generator=generator)) for low, high in pairwise(bounds)]
    return shifted(sigmas[steps[torch.tensor(chosen)]], shift=shift)


def _steps(sigmas, first, last):
    """Indices first..last-1 of the schedule's steps."""
    if not 0 <= first < last <= len(sigmas) - 1:
        raise ValueError(f"noise levels of steps {first}..{last - 1}: the schedule has steps 0..{len(sigmas) - 2}.")
    return torch.arange(first, last)
