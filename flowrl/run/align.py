"""flowrl.align: a run from Python."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flowrl.recipe import Recipe
from flowrl.run.config import from_dict
from flowrl.run.prepare import prepare
from flowrl.run.train import Result, evaluated, train


def align(
    model: object,
    *,
    rewards: str | Callable | Mapping[str, object],
    prompts: str | Path | Sequence[str],
    recipe: str | Mapping[str, object] | Recipe = "flow_grpo_fast",
    updates: int = 100,
    output: str | Path = "runs/align",
    resume: bool = False,
    **sections: object,
) -> Result:
    """Align a generator with rewards; returns `.pipeline`, `.metrics` and `.directory`.

    model:    folder of a saved pipeline, or a loaded diffusers pipeline in float32 or bfloat16, trained in place
    rewards:  a function (images, prompts, **metadata) -> numbers, the name of a built-in reward, or {name: weight} or
              {name: (function, weight)}
    prompts:  a prompt file, or a list of prompts
    recipe:   a key of `flowrl recipes`, {"name": key, change: value}, or a Recipe
    resume:   go on with the run in `output` from its newest checkpoint; all else as it was given then
    sections: what else a run file may hold, such as seed=1, budget={"prompts_per_update": 8}, model_settings={"train":
              "full"}, optimizer={...}, evaluation={...}
    """
    settings, functions = _rewards(rewards)
    loaded = not isinstance(model, str | Path)
    texts = () if isinstance(prompts, str | Path) else list(prompts)
    if not isinstance(prompts, str | Path) and not (texts and all(isinstance(text, str) for text in texts)):
        raise ValueError("prompts: expected a prompt file, or a list of at least one text.")
    own = recipe if isinstance(recipe, Recipe) else None
    file = Path(output) / "prompts.jsonl" if texts else prompts
    given = {**sections, "rewards": settings, "recipe": "own" if own else recipe, "output": str(output)}
    given["model"] = {**given.pop("model_settings", {}), "path": type(model).__name__ if loaded else str(model)}
    given["budget"] = {**given.get("budget", {}), "updates": updates}
    given["data"] = {"train": str(file), **given.get("data", {})}
    run = from_dict(given)
    pipe = model if loaded else None
    prepared = prepare(run, pipe=pipe, functions=functions, recipe=own, texts=texts, resume=resume)
    result = train(prepared)
    prepared.policy.finish(evaluated(prepared))
    return result


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
