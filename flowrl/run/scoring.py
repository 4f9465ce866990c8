"""The rewards of a run: declared by name and weight, loaded onto a device, and called for the pictures of prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import rewards
from flowrl.recipe import Recipe
from flowrl.run import prompts
from flowrl.run.settings import Run
from flowrl.visual.policy import Example
from flowrl.visual.score import Score


def declare(run: Run, functions: Mapping[str, Callable]) -> list[rewards.Reward]:
    """The rewards with nothing loaded: the function of each takes a device and makes the one that scores.

    functions: reward functions by name, in the place of rewards.NAME.function
    """
    declared = []
    for name, setting in run.rewards.items():
        make = rewards.find(functions.get(name) or setting.function or name, **setting.numbers)
        declared.append(rewards.Reward(name, make, setting.weight, setting.on_error, setting.deadline))
    rewards.check_weights(declared)
    return declared


def load(
    declared: Sequence[rewards.Reward], examples: Sequence[Example], device: str | torch.device
) -> list[rewards.Reward]:
    """The rewards on a device, each checked against the metadata of the prompts."""
    loaded = [replace(reward, function=reward.function(device)) for reward in declared]
    for reward in loaded:
        rewards.check(reward, prompts.column_names(examples))
    return loaded


def weights_by_name(scorers: Sequence[rewards.Reward]) -> dict[str, float]:
    """{column: weight}."""
    names = [name for reward in scorers for name in rewards.column_names(reward)]
    return dict(zip(names, rewards.check_weights(scorers).tolist(), strict=True))


def trained_and_all(scorers: Sequence[rewards.Reward], everybody: Sequence[Example]) -> tuple[Score, Score]:
    """(of the rewards that are trained, of all of them)."""
    trained = [reward for reward in scorers if rewards.is_trained(reward)]
    return make_score(trained, everybody), make_score(scorers, everybody)


def make_score(scorers: Sequence[rewards.Reward], everybody: Sequence[Example]) -> Score:
    """What the rewards say of images, one example each; metadata that any of `everybody` has is a column always."""
    return _Score(tuple(scorers), tuple(prompts.column_names(everybody)))


@dataclass(frozen=True)
class _Score:
    """What the rewards say; see visual.score.  sees: what any of them looks at."""

    scorers: tuple[rewards.Reward, ...]
    columns: tuple[str, ...]

    @property
    def sees(self) -> frozenset[str]:
        return frozenset().union(*map(rewards.sees, self.scorers))

    def __call__(
        self, pictures: Tensor | None, examples: Sequence[Example], group: Tensor, **states: Tensor
    ) -> rewards.RewardTable:
        """pictures: images, or videos of one dimension more."""
        texts, given = [e.prompt for e in examples], prompts.columns(examples, self.columns)
        images, videos = (None if pictures is None or pictures.ndim != n else pictures.cpu() for n in (4, 5))
        return rewards.score(self.scorers, images, texts, group, given, videos=videos, **states)


def check_states(score: Score, recipe: Recipe) -> None:
    """ValueError where noisy latents would be shown to a reward on pictures."""
    if recipe.estimate is None or "velocity" in recipe.estimate.needs:
        return
    for reward in score.scorers:
        if not {"images", "videos"}.isdisjoint(rewards.sees(reward)):
            raise ValueError(
                f"reward {reward.name!r} scores pictures alone, and estimate = {recipe.estimate.name} shows the noisy "
                "latents of every step. Set recipe.estimate: clean_estimate, or let it ask for latents and sigma."
            )


def check_frames(score: Score, frames: int) -> None:
    """ValueError where a reward on videos would be shown pictures."""
    for reward in score.scorers:
        if frames == 1 and "videos" in rewards.sees(reward):
            raise ValueError(
                f"reward {reward.name!r} scores videos, and this model draws pictures. Let it ask for images, or set "
                "model.frames."
            )
