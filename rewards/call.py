"""Call a reward by the names of its parameters and check what it answers.

A fault is a RewardError of one line that names the reward, the images concerned and their prompts.
"""

import queue
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rewards.answer import RewardError, read_components, read_values
from rewards.reward import Reward, column_names, parameters


def ask(
    reward: Reward,
    media: Mapping[str, object],
    metadata: Mapping[str, list],
) -> tuple[Float[Tensor, "N C"], Bool[Tensor, " N"]]:
    """Scores by column, 0 where invalid, and which rows are valid.  `media` holds images, prompts and group."""
    prompts, who = list(media["prompts"]), f"reward {reward.name!r}"
    n, names = len(prompts), column_names(reward)
    accepted = parameters(reward).values()
    wanted = {p.name for p in accepted}
    given = {name: value for name, value in {**media, **metadata}.items() if name in wanted}
    if any(p.kind is p.VAR_KEYWORD for p in accepted):
        given |= metadata
    try:
        answer = _within(reward.deadline, reward.function, given)
    except _Late:
        raise RewardError(f"{who} did not answer within {reward.deadline:g} s ({n} images)") from None
    except torch.OutOfMemoryError as error:  # never left out: a smaller call would have had an answer
        said = str(error).split(". ")[0]
        raise RewardError(f"{who} is out of memory ({said}; {n} images): give it smaller calls or a device") from error
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        fault = f"{who} raised {said} ({_place(error)}; {n} images, first prompt {_short(prompts[0])})"
        if reward.on_error == "raise":
            raise RewardError(fault) from error
        warnings.warn(f"{fault}; all of them are left out", stacklevel=2)
        return torch.zeros(n, len(names)), torch.zeros(n, dtype=torch.bool)
    components = tuple(reward.weight) if isinstance(reward.weight, Mapping) else None
    parts = read_components(who, answer, components)
    labels = [who] if components is None else [f"{who}, component {c!r}," for c in components]
    scores = [_finite(reward, label, part, prompts) for label, part in zip(labels, parts, strict=True)]
    value = torch.stack(scores, dim=1)
    finite = value.isfinite()
    return value.where(finite, 0.0), finite.all(dim=1)


class _Late(Exception):
    """No answer within the deadline; a class of its own, because a reward may raise any other."""


def _within(seconds: float, function: Callable, given: Mapping[str, object]) -> object:
    """What the function returns or raises; _Late where it does neither in time, and its thread is left behind."""
    answers: queue.SimpleQueue = queue.SimpleQueue()
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run():
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)  # a setting of the thread, which starts with the first one
            with torch.no_grad():  # another one
                answers.put((function(**given), None))
        except BaseException as error:  # raised again where it is waited for
            answers.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)  # a signal interrupts it
    except queue.Empty:
        raise _Late from None
    if error is not None:
        raise error
    return answer


def _finite(reward: Reward, who: str, answer: object, prompts: Sequence[str]) -> Float[Tensor, " N"]:
    """The scores; where one is not finite, raise or warn as the reward asks."""
    scores, given = read_values(who, answer, len(prompts))
    bad = (~scores.isfinite()).nonzero().flatten().tolist()
    if bad:
        shown = "; ".join(f"image {i} (prompt {_short(prompts[i])}): {given[i]}" for i in bad[:5])
        more = f"; and {len(bad) - 5} more" if len(bad) > 5 else ""
        fault = f"{who} returned {len(bad)} of {len(prompts)} values that are not finite: {shown}{more}"
        if reward.on_error == "raise":
            raise RewardError(f"{fault}. on_error: mask leaves such samples out.")
        warnings.warn(f"{fault}; left out", stacklevel=3)
    return scores


def _place(error: Exception) -> str:
    """File and line where it was raised, of the user's own code if that is on the way."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename and frame.filename != __file__]
    frame = (own or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def _short(prompt: str) -> str:
    return repr(prompt if len(prompt) <= 60 else prompt[:60] + "...")
