"""Pictures whose every step was chosen by the rewards among several draws."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl import randomness
from flowrl.part import part
from flowrl.recipe import Recipe
from flowrl.run.evaluation import Settings
from flowrl.visual.policy import Example, Policy
from flowrl.visual.ranks import Ranks, in_step
from flowrl.visual.score import Score, looks, show
from samplers import kernels
from samplers.guided import guided


def step_kernel(recipe: Recipe) -> Callable:
    """What every step draws from: the recipe's kernel, or Flow-SDE's where it draws nothing (OUR READING)."""
    kernel = recipe.rollout.kernel or part(kernels.flow_sde, eta=0.7)
    if "depth" in kernel.needs:
        raise ValueError(
            f"--guide: rollout.kernel {kernel.name} asks for the depth in a tree, and here every step draws. Set "
            "another one, such as recipe.rollout.kernel=flow_sde."
        )
    return kernel.bound


def sample_guided(
    policy: Policy, examples: Sequence[Example], settings: Settings, kernel: Callable, score: Score, *, count: int
) -> Float[Tensor, "N 3 H W"]:
    """`samples` pictures of each example, from the noise of an evaluation.

    `count` draws a step by the kernel; rewards on pictures see one-step clean estimates, those on latents alone the
    noisy draws. batch_size bounds the rows of a network call, and what is scored at once beyond the draws of a state.
    """
    policy.guidance = settings.guidance
    velocity = in_step(policy, Ranks(), 1, settings.batch_size)
    pictures, per_chunk = [], max(settings.batch_size // count, 1)  # the draws of a state are compared, and so together
    everything = [(i, s) for i in range(len(examples)) for s in range(settings.samples)]
    for first in range(0, len(everything), per_chunk):
        names = everything[first : first + per_chunk]
        noise = [policy.noise(1, randomness.generator(settings.seed, "evaluation", *name)) for name in names]
        chunk = [examples[i] for i, _ in names]
        drawn_for = [example for example in chunk for _ in range(count)]
        group = torch.arange(first, first + len(names)).repeat_interleave(count)

        def worth(latents, sigma, drawn_for=drawn_for, group=group):
            table = show(score, policy.decode, latents, drawn_for, group, sigma)
            return torch.where(table.valid, table.total(), -torch.inf)

        finals = guided(
            velocity,
            torch.cat(noise),
            policy.encode(chunk),
            policy.sigmas(settings.steps),
            kernel,
            worth,
            count=count,
            ahead=looks(score),
            generators=[randomness.generator(settings.seed, "guidance", *name) for name in names],
        )
        pictures.append(policy.decode(finals).cpu())
    return torch.cat(pictures)
