"""From media to numbers: load rewards by name, score images, get one RewardTable.

A built-in reward is a file here with `load(device="cpu", *, numbers...)`, which returns its score function; what a
reward function may ask for is said in `rewards.reward`, what it may answer in `rewards.answer`.
"""

import ast
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rewards.answer import RewardError
from rewards.call import ask
from rewards.media import check_images, check_videos, quantise
from rewards.nearest import did_you_mean
from rewards.reward import MEDIA, Reward, by_frame, check, check_weights, column_names, is_trained, sees
from rewards.table import RewardTable

__all__ = [
    "Reward",
    "RewardError",
    "RewardTable",
    "check",
    "check_weights",
    "column_names",
    "find",
    "is_trained",
    "load",
    "score",
    "sees",
]


def load(name_or_function: str | Callable, device: str | torch.device = "cpu", **numbers: object) -> Callable:
    """The score function of a built-in reward, of `module:function`, or the function given, with its numbers set.

    `device` is where a built-in reward puts its model.  ValueError for a name or a number that does not exist.
    """
    return find(name_or_function, **numbers)(device)


def find(name_or_function: str | Callable, **numbers: object) -> Callable[[str | torch.device], Callable]:
    """What makes the score function, given a device: no model is loaded and no file of a user imported before that.

    ValueError for a built-in reward that does not exist, or for a number that it does not take.
    """
    if not isinstance(name_or_function, str) or ":" in name_or_function:
        return lambda device: _own(name_or_function, numbers)
    known = _built_in()
    if name_or_function not in known:
        raise ValueError(
            f"reward {name_or_function!r}: no such reward.{did_you_mean(name_or_function, known)} "
            f"Rewards here: {', '.join(known)}; or your own as module:function."
        )
    make = importlib.import_module(f"rewards.{name_or_function}").load
    accepted = [p.name for p in inspect.signature(make).parameters.values() if p.kind is p.KEYWORD_ONLY]
    _check_numbers(name_or_function, numbers, accepted)
    return partial(make, **numbers)


def _own(name_or_function: str | Callable, numbers: Mapping[str, object]) -> Callable:
    """The function of a user's file, or the function given, with its numbers set."""
    name, function = str(name_or_function), name_or_function
    if isinstance(function, str):
        function = _imported(function)
    if not numbers:
        return function
    named = inspect.signature(function).parameters.values()
    accepted = [p.name for p in named if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in MEDIA]
    _check_numbers(name, numbers, accepted)
    return partial(function, **numbers)


def _built_in() -> list[str]:
    """The files here that define `load`, read without importing them: some import large models."""
    files = sorted(path for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__")
    return [
        path.stem
        for path in files
        if any(isinstance(node, ast.FunctionDef) and node.name == "load" for node in ast.parse(path.read_bytes()).body)
    ]


def _check_numbers(name: str, given: Iterable[str], accepted: Sequence[str]) -> None:
    for number in given:
        if number not in accepted:
            raise ValueError(
                f"reward {name!r}: {number!r} is not one of its numbers.{did_you_mean(number, accepted)} "
                f"Accepted: {', '.join(accepted) or 'none'}."
            )


def _imported(address: str) -> Callable:
    module_name, _, function_name = address.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's file raises while it is imported
        said = " ".join(str(error).split())
        kind = type(error).__name__
        raise ValueError(f"reward {address!r}: cannot import {module_name!r}: {kind}: {said}") from error
    functions = {name: value for name, value in vars(module).items() if callable(value)}
    if function_name not in functions:
        near = did_you_mean(function_name, functions)
        raise ValueError(f"reward {address!r}: {module.__file__} has no function {function_name!r}.{near}")
    return functions[function_name]


def score(
    rewards: Sequence[Reward],
    images: Float[Tensor, "N 3 H W"] | None,
    prompts: Sequence[str],
    group: Int[Tensor, " N"],
    metadata: Mapping[str, list],
    *,
    videos: Float[Tensor, "N F 3 H W"] | None = None,
    latents: Float[Tensor, "N *L"] | None = None,
    sigma: Float[Tensor, " N"] | None = None,
) -> RewardTable:
    """What every reward says about every image or video, or about latents at noise levels `sigma`.

    `metadata` holds a list of N for each column of the prompt file.

    Pixels are RGB in [0, 1] and are rounded to 8 bits first, so that a reward sees what a PNG holds.  Of a video a
    reward that knows images alone sees every frame; its score is their mean, where all could be scored (OUR READING).
    ValueError for pixels, lengths or weights that cannot be; RewardError for what a reward does or answers.
    """
    weight = check_weights(rewards)
    if images is not None:
        check_images(images)
    if videos is not None:
        check_videos(videos)
    shown = {"images": images, "videos": videos, "latents": latents, "sigma": sigma}
    shown = {name: rows for name, rows in shown.items() if rows is not None}
    what, n = next((name, len(rows)) for name, rows in shown.items())
    for name, rows in {**shown, "prompts": prompts, "group": group, **metadata}.items():
        if len(rows) != n:
            raise ValueError(f"{name}: {len(rows)} for {n} {what}; expected one for each {what.removesuffix('s')}")
    values, valid = [], torch.ones(n, dtype=torch.bool)
    for reward in rewards:
        check(reward, metadata)
        value, scored = _asked(reward, shown, prompts, group, metadata)
        values.append(value)
        valid &= scored
    names = tuple(name for reward in rewards for name in column_names(reward))
    return RewardTable(torch.cat(values, dim=1), weight, group.cpu().long(), valid, names)


def _asked(reward, shown, prompts, group, metadata):
    """(value [N, C], valid [N]) of one reward."""
    if "videos" in shown and by_frame(reward):
        return _by_frame(reward, shown, prompts, group, metadata)
    absent = sees(reward) - shown.keys()
    if absent:
        raise ValueError(
            f"reward {reward.name!r} asks for {', '.join(sorted(absent))}; there are only {', '.join(shown)}"
        )
    # Each reward gets its own copies: one that writes to its input must not change what the next one sees.
    media = {name: quantise(x) if name in ("images", "videos") else x.clone() for name, x in shown.items()}
    media |= {"prompts": list(prompts), "group": group.clone()}
    return ask(reward, media, {name: list(column) for name, column in metadata.items()})


def _by_frame(reward, shown, prompts, group, metadata):
    """The means over the frames of videos, each shown as an image with all that is known of its video."""
    frames = shown["videos"].shape[1]
    images = {"images": shown["videos"].flatten(0, 1)}
    images |= {name: x.repeat_interleave(frames, 0) for name, x in shown.items() if name != "videos"}
    texts, *columns = ([x for x in rows for _ in range(frames)] for rows in (prompts, *metadata.values()))
    given = dict(zip(metadata, columns, strict=True))
    value, valid = _asked(reward, images, texts, group.repeat_interleave(frames), given)
    return value.unflatten(0, (-1, frames)).mean(1), valid.unflatten(0, (-1, frames)).all(1)
