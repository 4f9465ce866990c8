"""What an adapter of a pipeline has to keep, tried on the model itself.

A check returns the largest deviation that it found, in the unit that its first line names, or raises ValueError.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowrl import randomness
from flowrl.visual.policy import Example, Policy
from samplers import rollout
from samplers.density import gaussian
from samplers.kernels import bind, flow_sde, spread

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


@torch.no_grad()
def rows_apart(policy: Policy, examples: Sequence[Example], *, seed: int = 0) -> float:
    """How far a row's velocity depends on its batch and on the others' sigma, relative to its size."""
    prompt, n = policy.encode(examples), len(examples)
    latents = _noise(policy, n, seed)
    sigma = torch.linspace(0.9, 0.3, n, device=latents.device)
    together = policy.velocity(latents, sigma, prompt)
    each = torch.cat([policy.velocity(latents[i : i + 1], sigma[i : i + 1], prompt[i : i + 1]) for i in range(n)])
    return float((together - each).abs().max() / together.abs().max())


@torch.no_grad()
def ratio_replayed(policy: Policy, examples: Sequence[Example], *, steps: int = 4, seed: int = 0) -> float:
    """Largest distance from 1 of the ratio, where decisions are scored again in calls of the same shape."""
    sigmas, n = policy.sigmas(steps), len(examples)
    kernel = bind(flow_sde, sigmas=sigmas)
    generators = [randomness.generator(seed, "replayed", i) for i in range(n)]
    noise, prompt = _noise(policy, n, seed), policy.encode(examples)
    tree = rollout(policy.velocity, noise, prompt, sigmas, kernel, noisy=range(steps - 1), generators=generators)
    most = 0.0
    for step in range(steps - 1):
        edge = tree.edge[:, step]
        source, target = (tree.states[row[edge].to(tree.states.device)] for row in (tree.source, tree.target))
        sigma, sigma_next = (sigmas[t].to(source.device).expand(n) for t in (step, step + 1))
        mean, std = kernel(source, policy.velocity(source, sigma, prompt), sigma, sigma_next)
        ratio = (gaussian(target, mean, std) - tree.log_prob[edge.to(tree.log_prob.device)]).exp()
        most = max(most, float((ratio - 1).abs().max()))
    return most


def _noise(policy, n, seed):
    return torch.cat([policy.noise(1, randomness.generator(seed, "contract", i)) for i in range(n)])
