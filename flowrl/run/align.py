"""flowrl.align: a run from Python."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from flowrl.run.config import from_dict
from flowrl.run.prepare import prepare
from flowrl.run.train import Result, train


def align(
    model: object,
    *,
    rewards: str | Callable | Mapping[str, object],
    prompts: str | Path | Sequence[str],
    recipe: str | Mapping[str, object] = "flow_grpo_fast",
    updates: int = 100,
    output: str | Path = "runs/align",
    **sections: object,
) -> Result:
    """Align a generator with rewards; returns `.pipeline`, `.metrics` and `.directory`.

    model:    folder of a saved pipeline, or a loaded diffusers pipeline, which is trained in place
    rewards:  a function (images, prompts, **metadata) -> numbers, the name of a built-in reward, or {name: weight} or
              {name: (function, weight)}
    prompts:  a prompt file, or a list of prompts
    sections: what else a run file may hold, such as seed=1, budget={"prompts_per_update": 8}, model_settings={"train":
              "full"}, optimizer={...}, evaluation={...}
    """
    settings, functions = _rewards(rewards)
    loaded = not isinstance(model, str | Path)
    given = {**sections, "rewards": settings, "recipe": recipe, "output": str(output)}
    given["model"] = {**given.pop("model_settings", {}), "path": type(model).__name__ if loaded else str(model)}
    given["budget"] = {**given.get("budget", {}), "updates": updates}
    with TemporaryDirectory() as scratch:
        file = prompts
        if not isinstance(prompts, str | Path):
            file = Path(scratch) / "prompts.txt"
            file.write_text("\n".join(p.replace("\n", " ") for p in prompts), encoding="utf-8")
        given["data"] = {"train": str(file), **given.get("data", {})}
        prepared = prepare(from_dict(given), pipe=model if loaded else None, functions=functions)
    return train(prepared)


def _rewards(given):
    """(the `rewards` section, functions by name)."""
    if isinstance(given, str):
        given = {given: 1.0}
    elif callable(given):
        given = {getattr(given, "__name__", "reward"): (given, 1.0)}
    settings, functions = {}, {}
    for name, value in given.items():
        if isinstance(value, tuple):
            functions[name], settings[name] = value
        elif callable(value):
            functions[name], settings[name] = value, 1.0
        else:
            settings[name] = value
    return settings, functions
