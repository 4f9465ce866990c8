"""A reward: a function, its name, its weight and what to do where it fails; and what can be checked before training.

A reward is a function of any of `images`, `videos`, `prompts`, `group`, `latents`, `sigma` and the metadata columns of
the prompt file, found by name; a parameter with a default may be absent, and `**metadata` receives the columns that no
parameter names.  The documented form is `(images, prompts, **metadata) -> list of numbers`; `(videos, prompts)` sees
whole videos; `(latents, sigma, prompts)` scores states on the way, too, without decoding them.  Every fault here is a
ValueError of one line.
"""

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.nearest import did_you_mean

MEDIA = ("images", "videos", "prompts", "group", "latents", "sigma")
ON_ERROR = ("raise", "mask")


@dataclass(frozen=True)
class Reward:
    """A reward function and how its answer counts.

    The weight may be negative; for an answer that is a dict it is a mapping, a number for each component.  A reward
    whose weights are all 0 is evaluated and never trained.

    `on_error`: "raise" stops at a value that is None, NaN or infinite and at an exception; "mask" warns and leaves
    those samples out.  An answer of the wrong length, shape or type always stops, and so does none within `deadline`
    seconds: what hangs cannot be asked again.
    """

    name: str
    function: Callable
    weight: float | int | Mapping[str, float | int] = 1.0
    on_error: str = "raise"
    deadline: float = 600.0

    def __post_init__(self) -> None:
        if self.on_error not in ON_ERROR:
            raise ValueError(
                f"reward {self.name!r}: on_error is {self.on_error!r}."
                f"{did_you_mean(self.on_error, ON_ERROR)} Accepted: {', '.join(ON_ERROR)}."
            )
        if not self.deadline > 0:
            raise ValueError(f"reward {self.name!r}: deadline {self.deadline!r}; expected a positive number of seconds")
        for weight in _weights(self):
            if not isinstance(weight, Real) or isinstance(weight, bool) or not math.isfinite(weight):
                raise ValueError(f"reward {self.name!r}: weight {weight!r}; expected a finite number")
        if not _weights(self):
            raise ValueError(f"reward {self.name!r}: weight is empty; expected a number, or a number per component")


def _weights(reward: Reward) -> list:
    return list(reward.weight.values()) if isinstance(reward.weight, Mapping) else [reward.weight]


def is_trained(reward: Reward) -> bool:
    """Whether any weight counts; otherwise the reward is only watched."""
    return any(weight != 0 for weight in _weights(reward))


def column_names(reward: Reward) -> tuple[str, ...]:
    """Its columns in the table, known before it answers: its name, or name_component in the order of the weight."""
    if isinstance(reward.weight, Mapping):
        return tuple(f"{reward.name}_{component}" for component in reward.weight)
    return (reward.name,)


def check_weights(rewards: Sequence[Reward]) -> Float[Tensor, " R"]:
    """The weight of every column; ValueError where there is none, all are zero or two columns share a name."""
    names = [name for reward in rewards for name in column_names(reward)]
    for name in (name for name in names if names.count(name) > 1):
        raise ValueError(f"rewards: column {name!r} appears twice; give each reward its own name ({', '.join(names)})")
    weight = torch.tensor([float(weight) for reward in rewards for weight in _weights(reward)])
    if not weight.any():
        raise ValueError(f"rewards: all weights are zero ({', '.join(names) or 'no rewards'}); give one a weight")
    return weight


def check(reward: Reward, columns: Collection[str]) -> None:
    """Raise ValueError unless the reward can be called where the prompt file carries these metadata columns."""
    available = [*MEDIA, *columns]
    for name in columns:
        if name in MEDIA:
            raise ValueError(f"metadata column {name!r} has the name of what every reward gets; rename it")
        if isinstance(reward.function, partial) and name in reward.function.keywords:
            raise ValueError(f"reward {reward.name!r}: {name!r} is both one of its numbers and a metadata column")
    used = 0
    for name, parameter in parameters(reward).items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(f"reward {reward.name!r}: parameter {name!r} is positional only; it must be known by name")
        if parameter.default is parameter.empty and name not in available:
            raise ValueError(
                f"reward {reward.name!r}: parameter {name!r} is not available."
                f"{did_you_mean(name, available)} Available: {', '.join(available)}."
            )
        used += name in available
    if not used:
        raise ValueError(f"reward {reward.name!r}: no parameter is one of {', '.join(available)}")


def sees(reward: Reward) -> frozenset[str]:
    """Which of images, videos and latents (with their noise level `sigma`, 0 where they are finished) it needs."""
    needed = {name for name, parameter in parameters(reward).items() if parameter.default is parameter.empty}
    return frozenset({"latents" if name == "sigma" else name for name in needed} & {"images", "videos", "latents"})


def by_frame(reward: Reward) -> bool:
    """Whether it sees the frames of a video one by one: it knows images, and nothing of videos."""
    return "images" in parameters(reward) and "videos" not in parameters(reward)


def parameters(reward: Reward) -> Mapping[str, inspect.Parameter]:
    """What the function asks for, by name and in order."""
    try:
        return inspect.signature(reward.function).parameters
    except (ValueError, TypeError) as error:
        raise ValueError(f"reward {reward.name!r}: the parameters of {reward.function!r} cannot be read") from error
