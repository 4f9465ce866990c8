"""A whole method on one page: every role in the order in which it acts, its numbers and its source."""

from collections.abc import Callable
from dataclasses import fields
from inspect import cleandoc, getsourcefile, getsourcelines, unwrap
from pathlib import Path

from flowrl.part import Part
from flowrl.recipe import Recipe, Snapshot
from flowrl.visual.trainer import noisy_steps
from samplers import schedules

ROOT = Path(__file__).resolve().parents[1]


def explain(recipe: Recipe, docstring: str) -> str:
    """The page as text; numbers of a part that the recipe leaves alone show the function's default."""
    lines = [cleandoc(docstring), ""]
    settings = _settings(recipe.rollout, "rollout.")
    settings += _settings(recipe.noising, "noising.") if recipe.noising else []
    settings += _settings(recipe, "", besides=("rollout", "noising", "penalties", "snapshots"))
    plain = [(role, value) for role, value in settings if not isinstance(value, Part) and value not in ({}, None)]
    lines += [f"{role} = {value}" for role, value in plain]
    lines += [f"leaves = {_leaves(recipe)} per prompt (derived)"]
    lines += [f"snapshots.{name} = {rule(one)}" for name, one in recipe.snapshots.items()]
    acts = [(role, value) for role, value in settings if isinstance(value, Part)]
    acts += [(f"penalty x {scale}", value) for scale, value in recipe.penalties]
    for role, value in acts:
        lines += ["", f"# {role}: {value.name}{_numbers(value)}   ({where(value.fn)})", *_body(value.fn)]
    return "\n".join(lines)


def _settings(section, prefix, besides=()):
    return [(prefix + f.name, getattr(section, f.name)) for f in fields(section) if f.name not in besides]


def _leaves(recipe):
    """Of the first iteration, on an even schedule."""
    steps = recipe.rollout.steps
    return recipe.rollout.leaves(noisy_steps(recipe, schedules.linear(steps), 0, 0))


def rule(snapshot: Snapshot) -> str:
    """How a snapshot follows, in words."""
    kept = snapshot.decay
    follows = f"keeps {kept.name}{_numbers(kept)}, every {snapshot.every}" if kept else "frozen"
    return follows + (f", guidance {snapshot.guidance:g}" if snapshot.guidance is not None else "")


def _numbers(filled):
    shown = {name: filled.number(name) for name in filled.takes}
    return f"({', '.join(f'{k}={v!r}' for k, v in shown.items())})" if shown else ""


def where(fn: Callable) -> str:
    """path:line of a function, the path from the root of the repository."""
    path = Path(getsourcefile(unwrap(fn)))
    path = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    lines, start = getsourcelines(fn)
    return f"{path}:{start + next(i for i, line in enumerate(lines) if line.lstrip().startswith('def '))}"


def _body(fn):
    """The first sentence and the code: what a reader needs to know the method."""
    code = [line.rstrip() for line in getsourcelines(fn)[0]]
    start = next(i for i, line in enumerate(code) if line.rstrip().endswith(":") and not line.lstrip().startswith("@"))
    body, doc = code[start + 1 :], cleandoc(fn.__doc__ or "").splitlines()
    quotes = [i for i, line in enumerate(body) if '"""' in line]
    if quotes and body[quotes[0]].lstrip().startswith('"""'):
        last = quotes[0] if body[quotes[0]].count('"""') == 2 else quotes[1]
        body = body[last + 1 :]
    return [f"    # {doc[0]}"] * bool(doc) + [line for line in body if line]
