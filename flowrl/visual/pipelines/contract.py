"""What an adapter of a pipeline keeps beside plain diffusers: the same pictures, and LoRA files that do the same there.

A check returns the largest deviation that it found, in the unit that its first line names, or raises ValueError.
"""

import tempfile
import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from diffusers.utils import load_image
from torch import Tensor

from flowrl import randomness
from flowrl.visual.pipelines.family import Family
from flowrl.visual.pipelines.lora import NAME
from flowrl.visual.pipelines.parts import modules
from flowrl.visual.pipelines.policy import PipelinePolicy
from flowrl.visual.policy import Example
from samplers import rollout

OTHER = "flowrl_check"  # name of the adapter as diffusers loads it


def drawn(
    family: Family, prompts: Sequence[str], noise: Tensor, steps: int, guidance: float, pictures: Sequence
) -> Tensor:
    """See Family.draw; the pipeline keeps its scheduler.

    Under autocast where a part is in bf16, but for the autoencoder, which is in fp32: not all pipelines cast for it.
    """
    own, half = family.pipe.scheduler, any(module.dtype == torch.bfloat16 for module in modules(family.pipe))
    family.pipe.scheduler = family.one_step(steps)
    try:
        cast = torch.autocast(noise.device.type, torch.bfloat16, enabled=half)
        with cast, _in_fp32(getattr(family.pipe, "vae", None), noise.device):
            return family.draw(prompts, noise, steps, guidance, pictures).float()
    finally:
        family.pipe.scheduler = own


@contextmanager
def _in_fp32(vae, device):
    """An autoencoder that works outside of an autocast, and casts what it is given."""
    for name in ("encode", "decode") if vae is not None else ():
        setattr(vae, name, partial(torch.autocast(device.type, enabled=False)(_cast_first), getattr(vae, name)))
    try:
        yield
    finally:
        for name in ("encode", "decode") if vae is not None else ():
            delattr(vae, name)


def _cast_first(work, x, *arguments, **named):
    return work(x.float(), *arguments, **named)


@torch.no_grad()
def pictures_apart(policy: PipelinePolicy, examples: Sequence[Example], *, steps: int, guidance: float) -> float:
    """Largest distance, in pixels of 0..1, of an ODE rollout from what the pipeline draws from the same noise."""
    policy.guidance, n = guidance, len(examples)
    noise = torch.cat([policy.noise(1, randomness.generator(0, "parity", i)) for i in range(n)])
    sigmas = policy.family.sigmas(steps, policy.family.GRIDS[0])  # those of pipe(num_inference_steps=steps)
    latents = rollout(policy.velocity, noise, policy.encode(examples), sigmas).leaves()
    ours = (policy.family.decode(latents).float() / 2 + 0.5).clamp(0, 1)
    seen = [[load_image(file) for file in example.pictures] for example in examples]
    theirs = drawn(policy.family, [e.prompt for e in examples], noise, steps, guidance, seen)
    ours = ours if ours.ndim == 4 else ours.transpose(1, 2)
    return float((ours.flatten() - theirs.flatten()).abs().max())


@torch.no_grad()
def adapter_apart(policy: PipelinePolicy, examples: Sequence[Example]) -> tuple[float, float]:
    """(how far a saved adapter does something else in plain diffusers, what it does), relative to the velocity.

    The policy's adapter is random afterwards.
    """
    prompt = policy.encode(examples)
    latents = torch.cat([policy.noise(1, randomness.generator(0, "parity", i)) for i in range(len(examples))])
    sigma = torch.linspace(0.9, 0.3, len(examples), device=latents.device)
    before = policy.velocity(latents, sigma, prompt)
    for name, parameter in policy.trainable():
        drawn = torch.randn(parameter.shape, generator=randomness.generator(0, name))
        parameter.add_(0.1 * drawn.to(parameter))
    ours, pipe = policy.velocity(latents, sigma, prompt), policy.pipe
    with tempfile.TemporaryDirectory() as folder:
        policy.save(Path(folder))
        for name in policy.networks:
            other = name not in ("transformer", "unet")
            place, into = (Path(folder) / name, {f"load_into_{name}": True}) if other else (Path(folder), {})
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # the policy's own
                pipe.load_lora_weights(place, adapter_name=OTHER, **into)
    for network in policy.networks.values():
        network.set_adapter(OTHER)
    theirs = policy.velocity(latents, sigma, prompt)
    for network in policy.networks.values():
        network.set_adapter(NAME)
        network.delete_adapters(OTHER)
    size = before.abs().max()
    return float((theirs - ours).abs().max() / size), float((ours - before).abs().max() / size)
