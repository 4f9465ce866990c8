"""Which steps draw noise, and how many each jump spans: (steps, sigmas) -> {step: length}.

A jump ends at sigmas[step + length]. Several low-entropy steps are merged into one with more noise; the others follow
the ODE.
"""

import math

from jaxtyping import Float
from torch import Tensor

from samplers.kernels import flow_sde


def merged(
    steps: int, sigmas: Float[Tensor, " T1"], *, eta: float = 0.7, threshold: float = 2.2, within: float = 0.5
) -> dict[int, int]:
    """{step: steps that one Flow-SDE jump from it spans}, just enough for its entropy.  E-GRPO.  arXiv:2601.00423

    Of the first `within` of the steps. A jump is long enough where noise_power reaches the threshold (the unit is OUR
    READING); a step from which no jump short of the picture is, is left out.
    """
    found = {}
    power = [noise_power(sigmas, eta=eta, length=n) for n in range(1, steps)]
    for t in range(min(int(within * steps), steps - 1)):
        long_enough = [n for n in range(1, steps - t) if float(power[n - 1][t]) >= threshold]
        if long_enough:
            found[t] = long_enough[0]
    return found


def noise_power(sigmas: Float[Tensor, " T1"], *, eta: float = 0.7, length: int = 1) -> Float[Tensor, " M"]:
    """2 pi e std^2 = exp(2 h) of every Flow-SDE jump over `length` steps, h its entropy in nats per latent dim.

    arXiv:2601.00423
    """
    nothing = sigmas.new_zeros(len(sigmas) - length, 1)
    _, std = flow_sde(nothing, nothing, sigmas[:-length], sigmas[length:], sigmas, eta=eta)
    return 2 * math.pi * math.e * std**2
