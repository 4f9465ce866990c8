"""Read what a reward answered.  Nothing is broadcast, guessed or replaced by a score.

One value per image may come as a list, a tuple, an array or a tensor of shape (n,) or (n, 1), on any device and of any
real type; `{component: values}` is several of them.  None, NaN and infinity (also of fp32) mean "could not be scored".
Every fault of an answer is a RewardError, which is a ValueError: one line that names the reward.
"""

import math
from collections.abc import Mapping, Sequence
from numbers import Real

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rewards.nearest import did_you_mean


class RewardError(ValueError):
    """A reward's code or its answer failed while it was scoring."""


def read_components(who: str, answer: object, components: Sequence[str] | None) -> list[object]:
    """The part of `answer` for each column; `components` are those that the weight names, None where it is a number."""
    if not isinstance(answer, Mapping):
        if components is not None:
            raise RewardError(
                f"{who} has a weight for each of {', '.join(components)}, but returned "
                f"{_kind(answer)}; return {{component: values}} or make its weight one number"
            )
        return [answer]
    returned = ", ".join(map(str, answer)) or "none"
    if components is None:
        if len(answer) != 1:
            raise RewardError(
                f"{who} returned components ({returned}), but its weight is one number; "
                "give a weight for each: {component: number}"
            )
        return list(answer.values())
    for name in components:
        if name not in answer:
            raise RewardError(
                f"{who} has a weight for component {name!r}, which it did not return."
                f"{did_you_mean(name, answer)} It returned: {returned}."
            )
    for name in answer:
        if name not in components:
            raise RewardError(
                f"{who} returned component {name!r}, which has no weight (0 is one)."
                f"{did_you_mean(name, components)} Weights: {', '.join(components)}."
            )
    return [answer[name] for name in components]


def read_values(who: str, answer: object, n: int) -> tuple[Float[Tensor, " N"], list[object]]:
    """n scores in fp32, not finite where they could not be scored, and the values as they were given."""
    given = _rows(who, answer, n)
    if len(given) != n:
        raise RewardError(f"{who} returned {len(given)} value{'s' * (len(given) != 1)} for {n} images")
    given = [_single(who, value, i) for i, value in enumerate(given)]
    numbers = [math.nan if value is None else float(value) for value in given]
    return torch.tensor(numbers, dtype=torch.float64).float(), given


def _rows(who: str, answer: object, n: int) -> list[object]:
    if isinstance(answer, list | tuple):
        return list(answer)
    if isinstance(answer, Tensor | np.ndarray):
        if answer.ndim == 0 or any(size != 1 for size in answer.shape[1:]):
            raise RewardError(f"{who} returned shape {tuple(answer.shape)} for {n} images; expected ({n},) or ({n}, 1)")
        return answer.reshape(len(answer)).tolist()
    if isinstance(answer, Real | np.bool_):
        raise RewardError(f"{who} returned a single number ({answer}) for {n} images; expected {n} values")
    raise RewardError(f"{who} returned {_kind(answer)} for {n} images; expected a list, array or tensor of {n} numbers")


def _single(who: str, value: object, i: int) -> object:
    """A number or None, taken out of a tensor, array or list that holds just it."""
    if isinstance(value, Tensor | np.ndarray) and math.prod(value.shape) == 1:
        value = value.item()
    elif isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if value is None or isinstance(value, Real | np.bool_):
        return value
    held = f" of {len(value)} values" if isinstance(value, list | tuple) else ""
    held = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor | np.ndarray) else held
    raise RewardError(f"{who} returned {_kind(value)}{held} for image {i}; expected one number for each image")


def _kind(value: object) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"
