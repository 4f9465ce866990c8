"""Changes to a recipe by name, as a run file or a command line gives them.

`rollout.steps: 8` sets a number of the rollout, `objective.clip_low: 2e-4` a number of a part, `rollout.kernel: cps` or
`credit: my_package.my_file:my_function` puts another function into a role, `rollout.solver: null` takes it out,
`penalties.velocity_mse: 1e-3` adds or rescales a penalty (0 takes it out), `snapshots.old.decay: linear` and
`snapshots.old.every: 4` change the rule of a snapshot.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from importlib import import_module
from inspect import getmembers, isfunction
from math import isfinite
from types import GenericAlias
from typing import get_args, get_origin

from flowrl.part import Part, nearest
from flowrl.recipe import Noising, Recipe, Rollout, Snapshot, frozen

MENUS = {  # where a bare function name of a role is looked up, and what a function of that role asks for first
    "rollout.kernel": (("samplers.kernels",), ("latents",)),
    "rollout.density": (("samplers.density",), ("next_latents",)),
    "rollout.noisy": (("samplers.noise_plans", "samplers.merges"), ("steps",)),
    "rollout.forks": (("samplers.fork_plans",), ("noisy",)),
    "rollout.noise": (("samplers.noise",), ("own",)),
    "rollout.solver": (("samplers.solvers",), ("velocity",)),
    "rollout.tail": (("samplers.schedules",), ("sigmas",)),
    "noising.times": (("samplers.times",), ("draws",)),
    "noising.elbo": (("flowrl.objectives.elbos",), ("velocity",)),
    "allocate": (("flowrl.allocation.budgets",), ("count",)),
    "pilot": (("flowrl.allocation.prompts",), ("score",)),
    "estimate": (("samplers.estimates",), ("latents",)),
    "track": (("flowrl.memory.trackers",), ("reward", "divergence")),
    "advantage": (
        ("flowrl.advantages.outcome", "flowrl.advantages.many_rewards", "flowrl.advantages.history"),
        ("reward",),
    ),
    "credit": (("flowrl.advantages.tree", "flowrl.advantages.steps"), ("advantage", "state_reward")),
    "chunks": (("flowrl.objectives.chunks",), ("steps", "change")),
    "select": (("flowrl.objectives.select",), ("noisy",)),
    "update": (("flowrl.updates",), ("group",)),
    "weight": (("flowrl.objectives.weights",), ("mask",)),
    "points": (("flowrl.visual.points",), ("tree",)),
    "ratio": (("flowrl.objectives.ratios",), ("log_prob", "elbo")),
    "objective": (
        ("flowrl.objectives.clipped", "flowrl.objectives.score", "flowrl.objectives.forward"),
        ("ratio", "log_prob", "velocity", "elbo"),
    ),
    "penalties": (("flowrl.objectives.penalties",), None),
    "decay": (("flowrl.decays",), ("refresh",)),
}
PLAIN = (int, float, bool, str)  # types that a number may be annotated with, or a Sequence of one of them
OPTIONAL = (
    "rollout.kernel",
    "rollout.density",
    "rollout.noisy",
    "rollout.noise",
    "rollout.solver",
    "rollout.tail",
    "noising.elbo",
    "allocate",
    "pilot",
    "estimate",
    "track",
    "chunks",
    "ratio",
)


def changed(recipe: Recipe, changes: Mapping[str, object]) -> Recipe:
    """The recipe with all changes made: functions first, then numbers, so that their order does not matter."""
    functions = {k: v for k, v in changes.items() if _menu_of(k) and (k != "rollout.forks" or isinstance(v, str))}
    numbers = {k: v for k, v in changes.items() if k not in functions}
    for key, value in functions.items():
        absent = value is None and key in OPTIONAL
        recipe = _fill(recipe, key, None if absent else part_for(_menu_of(key), value, f"recipe.{key}"))
    for key, value in numbers.items():
        recipe = _set(recipe, key, value)
    return _with_snapshots(recipe, {key.split(".")[1] for key in changes if key.startswith("snapshots.")})


def _menu_of(key):
    """The role whose functions `key` may name; none for a number."""
    if key.startswith("snapshots.") and key.count(".") == 2 and key.endswith(".decay"):
        return "decay"
    return key if key in MENUS and key not in ("penalties", "decay") else None


def part_for(role: str, value: object, setting: str) -> Part:
    """The function that `value` names, out of the role's menu or as `module:function`, with its own numbers."""
    if not isinstance(value, str):
        raise ValueError(f"{setting} = {value!r}: expected the name of a function.")
    if ":" in value:
        return Part(imported(value, setting))
    known = menu(role)
    if value not in known:
        raise ValueError(f"{setting} = {value!r}: no such function. {nearest(value, known)}Known: {', '.join(known)}.")
    return Part(known[value])


def menu(role: str) -> dict[str, Callable]:
    """The functions that can fill a role by their bare name; helpers that ask for something else are not among them."""
    modules, first = MENUS[role]
    found = [
        (n, f)
        for m in modules
        for n, f in getmembers(import_module(m), isfunction)
        if f.__module__ == m and n[0] != "_"
    ]
    return {n: f for n, f in found if first is None or Part(f).needs[0] in first}


def imported(address: str, setting: str) -> Callable:
    """The object behind `my_package.my_file:my_function`."""
    module, _, name = address.partition(":")
    try:
        found = vars(import_module(module))
    except Exception as error:  # whatever a user's file raises while it is imported
        raise ValueError(f"{setting} = {address!r}: cannot import {module!r} ({error}).") from error
    if not callable(found.get(name)):
        raise ValueError(f"{setting} = {address!r}: {module!r} has no function {name!r}. {nearest(name, found)}")
    return found[name]


def as_type(value: object, kind: type | GenericAlias, setting: str):
    """`value` as int, float, bool, str or a list of one of them; '1e-5' is a number, whatever YAML thinks."""
    if get_origin(kind) is Sequence:
        (each,) = get_args(kind)
        if not isinstance(value, list | tuple):
            raise ValueError(f"{setting} = {value!r}: expected a list of {each.__name__}, such as [a, b].")
        return tuple(as_type(x, each, setting) for x in value)
    try:
        if kind is float and not isinstance(value, bool) and isfinite(float(value)):
            return float(value)
        if kind is int and not isinstance(value, bool) and float(value) == int(float(value)):
            return int(float(value))
    except (TypeError, ValueError, OverflowError):
        pass
    if kind in (bool, str) and isinstance(value, kind):
        return value
    raise ValueError(f"{setting} = {value!r}: expected {'float, a finite number' if kind is float else kind.__name__}.")


def _fill(recipe, role, filled):
    head, _, tail = role.partition(".")
    if head == "rollout":
        return recipe.but(rollout={tail: filled})
    if head == "noising":
        return recipe.but(noising=replace(_noising(recipe, role), **{tail: filled}))
    if head == "snapshots":
        name = tail.partition(".")[0]
        return _with_rule(recipe, name, decay=filled)
    return recipe.but(**{role: filled})


def _noising(recipe, key):
    if recipe.noising is None:
        raise ValueError(f"recipe.{key} has no effect: the recipe does not noise finished pictures again.")
    return recipe.noising


def _with_rule(recipe, name, **changes):
    """The recipe whose snapshot `name` has another rule; one that it does not have yet starts as frozen."""
    rule = replace(recipe.snapshots.get(name, frozen()), **changes)
    return replace(recipe, snapshots={**recipe.snapshots, name: rule})


def _set(recipe, key, value):
    """One number, by its dotted name."""
    head, _, tail = key.partition(".")
    if head == "penalties":
        return _set_penalty(recipe, tail, value)
    if head == "rollout" and "." not in tail:
        return recipe.but(rollout={tail: _plain_value(Rollout, "rollout", tail, value)})
    if head == "noising" and "." not in tail:
        plain = _plain_value(Noising, "noising", tail, value)
        return recipe.but(noising=replace(_noising(recipe, key), **{tail: plain}))
    if head == "snapshots" and tail.count(".") == 1:
        name, _, number = tail.partition(".")
        return _with_rule(recipe, name, **{number: _plain_value(Snapshot, f"snapshots.{name}", number, value)})
    role, _, number = key.rpartition(".")
    filled = dict(recipe.parts()).get(role)
    if filled is None:
        known = [f"{section}.{n}" for section, cls in SECTIONS.items() for n in plain_fields(cls)]
        known += ["name", *(role for role in MENUS if role != "decay"), *(f"{r}.NUMBER" for r, _ in recipe.parts())]
        raise ValueError(f"recipe.{key}: no such setting. {nearest(key, known)}Settings here: {', '.join(known)}.")
    return _fill(recipe, role, _renumber(filled, number, value, role))


def _renumber(filled, number, value, role):
    takes = filled.takes
    if number not in takes:
        raise ValueError(
            f"recipe.{role}.{number}: no such number of {filled.name}. {nearest(number, takes)}"
            f"Numbers here: {', '.join(takes) or 'none'}."
        )
    kind = takes[number].annotation
    known = kind in PLAIN or (get_origin(kind) is Sequence and get_args(kind)[0] in PLAIN)
    typed = as_type(value, kind, f"recipe.{role}.{number}") if known else value
    return Part(filled.fn, {**filled.numbers, number: typed})


SECTIONS = {"rollout": Rollout, "noising": Noising, "snapshots.NAME": Snapshot}


def plain_fields(section: type) -> list[str]:
    """The settings of a section that are no functions."""
    return [f.name for f in fields(section) if f.type not in (Part, Part | None)]


def _plain_value(section, path, name, value):
    known = plain_fields(section)
    if name not in known:
        functions = [f.name for f in fields(section) if f.name not in known]
        raise ValueError(
            f"recipe.{path}.{name}: no such setting. {nearest(name, known)}Settings here: "
            f"{', '.join(known + functions)}."
        )
    setting, kind = f"recipe.{path}.{name}", next(f.type for f in fields(section) if f.name == name)
    if name == "strides":
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ValueError(f"{setting} = {value!r}: expected a list of numbers of levels, such as [1, 2].")
        return tuple(as_type(stride, int, setting) for stride in value)
    if name != "forks":
        return None if value is None and kind == float | None else as_type(value, _one_type(kind), setting)
    if not isinstance(value, Mapping):
        known = ", ".join(menu("rollout.forks"))
        raise ValueError(
            f"{setting} = {value!r}: expected {{step: children}}, such as {{0: 2, 3: 2}}, or one of {known}."
        )
    return {as_type(t, int, setting): as_type(n, int, setting) for t, n in value.items()}


def _one_type(kind):
    return float if kind == float | None else kind


def _set_penalty(recipe, tail, value):
    """`NAME = coefficient`, or a number of that penalty."""
    name, _, number = tail.partition(".")
    present = {p.name: (scale, p) for scale, p in recipe.penalties}
    if number:
        if name not in present:
            raise ValueError(
                f"recipe.penalties.{tail}: the recipe has no penalty {name!r}. It has: {', '.join(present)}."
            )
        scale, filled = present[name]
        present[name] = scale, _renumber(filled, number, value, f"penalties.{name}")
    else:
        filled = present[name][1] if name in present else part_for("penalties", name, f"recipe.penalties.{name}")
        present[name] = as_type(value, float, f"recipe.penalties.{name}"), filled
    return recipe.but(penalties=tuple((scale, p) for scale, p in present.values() if scale != 0))


def _with_snapshots(recipe, named):
    """Drop the snapshots that nothing asks for any more and no change names; a reference asked for is frozen."""
    used = recipe.suffixes | {recipe.rollout.by}
    kept = {name: rule for name, rule in recipe.snapshots.items() if name in used | named}
    if "ref" in used:
        kept.setdefault("ref", frozen())
    return replace(recipe, snapshots=kept)
