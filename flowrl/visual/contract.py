"""What an adapter of a pipeline has to keep, tried on the model itself."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowrl import randomness
from flowrl.visual.policy import Example, Policy
from samplers import rollout
from samplers.kernels import spread

LEVELS = (0.2, 0.4, 0.6, 0.8)
READINGS: dict[str, Callable] = {  # how a velocity may have been meant, and what is wrong then
    "": lambda v: v,
    "the sign of velocity looks reversed: it is noise - data, and the network's is data - noise": lambda v: (
        lambda x, sigma, prompt: -v(x, sigma, prompt)
    ),
    "the direction of time looks reversed: sigma is 1 at noise, and the network's time is 1 at data": lambda v: (
        lambda x, sigma, prompt: v(x, 1 - sigma, prompt)
    ),
    "sign and time look reversed: velocity is noise - data, and sigma is 1 at noise": lambda v: (
        lambda x, sigma, prompt: -v(x, 1 - sigma, prompt)
    ),
}


@torch.no_grad()
def check_direction(policy: Policy, examples: Sequence[Example], *, steps: int = 8, seed: int = 0) -> dict[str, float]:
    """{reading: its error} of four readings of the velocity; ValueError where another than its own explains it best.

    C38. A reading draws its pictures, noises them again and asks the velocity there: it should be noise - picture. The
    error is the worst over LEVELS of the mean square difference, relative to that of noise - picture. Of weights that
    have learned nothing all four are about 1, and nothing is said.
    """
    prompt = policy.encode(examples)
    start, again = (
        torch.cat([policy.noise(1, randomness.generator(seed, name, i)) for i in range(len(examples))])
        for name in ("direction", "direction again")
    )
    found = {}
    for said, reading in READINGS.items():
        velocity = reading(policy.velocity)
        clean = rollout(velocity, start, prompt, policy.sigmas(steps)).leaves()
        found[said] = max(_error(velocity, clean, again, prompt, level) for level in LEVELS)
    best = min(found, key=found.get)
    if best and found[best] < 0.75 * found[""]:
        raise ValueError(f"{best} (error {found[best]:.2f} so, {found['']:.2f} as it is).")
    return found


def _error(
    velocity: Callable,
    clean: Float[Tensor, "B *L"],
    noise: Float[Tensor, "B *L"],
    prompt: Int[Tensor, " B"],
    level: float,
) -> float:
    sigma = torch.full((len(clean),), level, device=clean.device)
    noised = (1 - spread(sigma, clean)) * clean + spread(sigma, clean) * noise
    target = noise - clean
    return float((velocity(noised, sigma, prompt) - target).square().mean() / target.square().mean())
