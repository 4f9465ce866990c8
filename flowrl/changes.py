"""Changes to a recipe by name, as a run file or a command line gives them.

`rollout.steps: 8` sets a number of the rollout, `objective.clip_low: 2e-4` a number of a part, `rollout.kernel: cps` or
`credit: my_package.my_file:my_function` puts another function into a role, `penalties.velocity_mse: 1e-3` adds or
rescales a penalty (0 takes it out).
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from importlib import import_module
from inspect import Parameter, getmembers, isfunction, signature
from math import isfinite

from flowrl.recipe import Part, Recipe, Rollout, frozen, nearest
from flowrl.vocabulary import split

MENUS = {  # where a bare function name of a role is looked up, and what a function of that role asks for first
    "rollout.kernel": ("samplers.kernels", "latents"),
    "rollout.density": ("samplers.density", "next_latents"),
    "rollout.noisy": ("samplers.noise_plans", "steps"),
    "rollout.noise": ("samplers.noise", "own"),
    "advantage": ("flowrl.advantages.outcome", "reward"),
    "credit": ("flowrl.advantages.tree", "advantage"),
    "select": ("flowrl.objectives.select", "noisy"),
    "weight": ("flowrl.objectives.weights", "mask"),
    "points": ("flowrl.visual.points", "tree"),
    "ratio": ("flowrl.objectives.ratios", "log_prob"),
    "objective": ("flowrl.objectives.clipped", "ratio"),
    "penalties": ("flowrl.objectives.penalties", None),
}


def changed(recipe: Recipe, changes: Mapping[str, object]) -> Recipe:
    """The recipe with all changes made: functions first, then numbers, so that their order does not matter."""
    functions = {k: v for k, v in changes.items() if k in MENUS and k != "penalties"}
    numbers = {k: v for k, v in changes.items() if k not in functions}
    for key, value in functions.items():
        recipe = _fill(recipe, key, part_for(key, value))
    for key, value in numbers.items():
        recipe = _set(recipe, key, value)
    return _with_snapshots(recipe)


def part_for(role: str, value: object) -> Part:
    """The function that `value` names, out of the role's menu or as `module:function`, with its own numbers."""
    if not isinstance(value, str):
        raise ValueError(f"recipe.{role} = {value!r}: expected the name of a function.")
    if ":" in value:
        return Part(imported(value, f"recipe.{role}"))
    known = menu(role)
    if value not in known:
        raise ValueError(
            f"recipe.{role} = {value!r}: no such function. {nearest(value, known)}Known: {', '.join(known)}."
        )
    return Part(known[value])


def menu(role: str) -> dict[str, Callable]:
    """The functions that can fill a role by their bare name; helpers that ask for something else are not among them."""
    module, first = MENUS[role]
    found = [(n, f) for n, f in getmembers(import_module(module), isfunction) if not n.startswith("_")]
    return {n: f for n, f in found if f.__module__ == module and first in (None, Part(f).needs[0])}


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


def as_type(value: object, kind: type, setting: str):
    """`value` as int, float, bool or str; '1e-5' is a number, whatever YAML thinks."""
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
    if role.startswith("rollout."):
        return recipe.but(rollout={role.removeprefix("rollout."): filled})
    return recipe.but(**{role: filled})


def _set(recipe, key, value):
    """One number, by its dotted name."""
    head, _, tail = key.partition(".")
    if head == "penalties":
        return _set_penalty(recipe, tail, value)
    if head == "rollout" and "." not in tail:
        return recipe.but(rollout={tail: _rollout_value(tail, value)})
    role, _, number = key.rpartition(".")
    filled = dict(recipe.parts()).get(role)
    if filled is None:
        known = [*(f"rollout.{n}" for n in PLAIN), *MENUS, *(f"{r}.NUMBER" for r, _ in recipe.parts())]
        raise ValueError(f"recipe.{key}: no such setting. {nearest(key, known)}Settings here: {', '.join(known)}.")
    return _fill(recipe, role, _renumber(filled, number, value, role))


def _renumber(filled, number, value, role):
    takes = {n: p for n, p in signature(filled.fn).parameters.items() if p.kind is Parameter.KEYWORD_ONLY}
    if number not in takes:
        raise ValueError(
            f"recipe.{role}.{number}: no such number of {filled.name}. {nearest(number, takes)}"
            f"Numbers here: {', '.join(takes) or 'none'}."
        )
    kind = takes[number].annotation
    typed = as_type(value, kind, f"recipe.{role}.{number}") if kind in (int, float, bool, str) else value
    return Part(filled.fn, {**filled.numbers, number: typed})


PLAIN = [f.name for f in fields(Rollout) if f.type not in (Part, "Part")]


def _rollout_value(name, value):
    if name not in PLAIN:
        raise ValueError(
            f"recipe.rollout.{name}: no such setting. {nearest(name, PLAIN)}Settings here: {', '.join(PLAIN)}, "
            f"{', '.join(role.removeprefix('rollout.') for role in MENUS if role.startswith('rollout.'))}."
        )
    setting = f"recipe.rollout.{name}"
    if name != "forks":
        return as_type(value, float if name == "guidance" else int, setting)
    if not isinstance(value, Mapping):
        raise ValueError(f"{setting} = {value!r}: expected {{step: children}}, such as {{0: 2, 3: 2}}.")
    return {as_type(t, int, setting): as_type(n, int, setting) for t, n in value.items()}


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
        filled = present[name][1] if name in present else part_for("penalties", name)
        present[name] = as_type(value, float, f"recipe.penalties.{name}"), filled
    return recipe.but(penalties=tuple((scale, p) for scale, p in present.values() if scale != 0))


def _with_snapshots(recipe):
    """Drop the snapshots that nothing asks for any more; a reference that is asked for is the frozen start."""
    asked = {split(name)[1] for name in recipe.needs} - {"", "old"}
    kept = {name: rule for name, rule in recipe.snapshots.items() if name in asked}
    if "ref" in asked:
        kept.setdefault("ref", frozen())
    return replace(recipe, snapshots=kept)
