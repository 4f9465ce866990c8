"""Evaluation on fixed held-out prompts and fixed noise, along the ODE."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowrl import randomness
from flowrl.visual.policy import Example, Policy
from flowrl.visual.ranks import Ranks
from flowrl.visual.score import Score, show
from rewards.media import quantise, stills
from rewards.statistics import STATISTICS, measure
from samplers import rollout


@dataclass(frozen=True)
class Settings:
    """How pictures are made for evaluation; printed with every evaluation."""

    steps: int
    guidance: float
    samples: int  # per prompt
    seed: int
    batch_size: int


def described(settings: Settings, pictures: Float[Tensor, "N 3 H W"], weights: str, frames: int) -> dict[str, object]:
    """C98: how the pictures or videos of an evaluation were made, for its line and its log."""
    height, width = pictures.shape[2:]
    return {
        "steps": settings.steps,
        "size": f"{width}x{height}",
        **({"frames": frames} if frames > 1 else {}),
        "guidance": settings.guidance,
        "kernel": "ode",
        "weights": weights,
        "seed": settings.seed,
    }


def said(description: Mapping[str, object]) -> str:
    """The description in a line."""
    return ", ".join(f"{name} {value}" for name, value in description.items())


def sample(
    policy: Policy,
    examples: Sequence[Example],
    settings: Settings,
    first: int = 0,
    agree: Callable[[int], int] = lambda count: count,
) -> Float[Tensor, "N *F 3 H W"]:
    """`samples` pictures or videos of each example, an example's next to each other; see finals."""
    return decoded(policy, finals(policy, examples, settings, first, agree), settings)


def decoded(policy: Policy, latents: Float[Tensor, "N *L"], settings: Settings) -> Float[Tensor, "N *F 3 H W"]:
    """The pictures or videos of latents, on the CPU, a batch at a time."""
    return torch.cat([policy.decode(some).cpu() for some in latents.split(settings.batch_size)])


@torch.no_grad()
def finals(
    policy: Policy,
    examples: Sequence[Example],
    settings: Settings,
    first: int = 0,
    agree: Callable[[int], int] = lambda count: count,
) -> Float[Tensor, "N *L"]:
    """The finished latents of `samples` pictures of each example; example i has the noise of `first` + i.

    agree: chunks of examples here -> of every rank, where all have to make equally many calls
    """
    policy.guidance = settings.guidance
    sigmas, found = policy.sigmas(settings.steps), []
    per_chunk = max(settings.batch_size // settings.samples, 1)
    for number in range(agree(-(-len(examples) // per_chunk))):
        start = number * per_chunk
        chunk = examples[start : start + per_chunk] or examples[:1]  # the first again only keeps step
        names = [(first + start + i, s) for i in range(len(chunk)) for s in range(settings.samples)]
        noise = [policy.noise(1, randomness.generator(settings.seed, "evaluation", *name)) for name in names]
        prompt = policy.encode(chunk).repeat_interleave(settings.samples)
        tree = rollout(policy.velocity, torch.cat(noise), prompt, sigmas, batch_size=settings.batch_size)
        found.append(tree.leaves())
    return torch.cat(found)[: len(examples) * settings.samples]


def evaluate(
    policy: Policy,
    examples: Sequence[Example],
    score: Score,
    settings: Settings,
    ranks: Ranks,
    *,
    main: int,
    pictures: int,
) -> tuple[dict[str, float], Float[Tensor, "N 3 H W"]]:
    """({"eval/NAME": mean over the first `main` examples, "eval/NAME/TAG": by tag}, pictures of the first examples).

    Of a video the picture is its middle frame.

    Every example counts once, whatever the number of processes. `eval/total` is the weighted sum of the rewards and
    `eval/stderr` its standard error over the prompts. `eval/diversity` is the mean distance between two pictures of
    one prompt (root mean square over pixels, 0..1); it needs two samples. `eval/image/NAME` is the mean of a statistic
    of the pictures themselves (rewards.statistics).
    """
    first, mine = ranks.share(examples)
    latents = finals(policy, mine, settings, first, ranks.agree)
    images = decoded(policy, latents, settings)
    each = [e for e in mine for _ in range(settings.samples)]
    group = first + torch.arange(len(mine)).repeat_interleave(settings.samples)
    table = show(score, lambda _: images, latents, each, group)
    value, valid = ranks.gather(table.value), ranks.gather(table.valid)
    owner = torch.arange(len(examples)).repeat_interleave(settings.samples)
    log = _means(table.names, value, valid & (owner < main), "")
    tags = [str(e.metadata.get("tag")) for e in examples for _ in range(settings.samples)]
    for tag in sorted(set(tags) - {"None"}):
        log |= _means(table.names, value, valid & torch.tensor([t == tag for t in tags]), f"/{tag}")
    log["eval/invalid"] = int((~valid).sum())
    log |= _total((value * table.weight).sum(1), valid & (owner < main), owner)
    for name, statistic in STATISTICS.items():
        found = measure(statistic, quantise(images))
        log[f"eval/image/{name}"] = float(ranks.gather(found)[owner < main].mean())
    each_prompt = images.unflatten(0, (-1, settings.samples))
    if settings.samples > 1:
        log["eval/diversity"] = float(ranks.gather(_spread(each_prompt))[:main].mean())
    return log, ranks.gather(stills(each_prompt[: max(pictures - first, 0), 0]))


def _means(names, value, rows, suffix):
    return {f"eval/{name}{suffix}": float(column[rows].mean()) for name, column in zip(names, value.T, strict=True)}


def _total(total: Float[Tensor, " N"], kept: Bool[Tensor, " N"], owner: Int[Tensor, " N"]) -> dict[str, float]:
    """The mean over pictures and, for two prompts or more, its standard error; a prompt's pictures count as one."""
    pictures, sums = (torch.bincount(owner[kept], weights=w) for w in (None, total[kept]))
    each = (sums / pictures)[pictures > 0]
    log = {"eval/total": float(total[kept].mean())}
    return log | ({"eval/stderr": float(each.std() / len(each) ** 0.5)} if len(each) > 1 else {})


def _spread(images: Float[Tensor, "P S *F 3 H W"]) -> Float[Tensor, " P"]:
    """Mean over the pairs of a prompt's pictures of their root mean square difference."""
    flat = images.flatten(2)
    pairs = torch.combinations(torch.arange(flat.shape[1]))
    return (flat[:, pairs[:, 0]] - flat[:, pairs[:, 1]]).square().mean(2).sqrt().mean(1)
