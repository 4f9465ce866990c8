"""A method is a Recipe: which pure function fills each role, and with what numbers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import partial
from inspect import Parameter, signature
from math import prod

from flowrl import vocabulary


def nearest(name: str, known) -> str:
    """A hint for an error message: the most similar known name, or nothing."""
    match = get_close_matches(str(name), [str(k) for k in known], n=1)
    return f"Did you mean {match[0]!r}? " if match else ""


@dataclass(frozen=True)
class Part:
    """A function with its numbers bound.  Arguments before the `*` are quantities, after it numbers."""

    fn: Callable
    numbers: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.fn.__name__

    @property
    def needs(self) -> list[str]:
        """The quantities it asks for, in order."""
        return [n for n, p in signature(self.fn).parameters.items() if p.kind is not Parameter.KEYWORD_ONLY]

    def __call__(self, **quantities):
        return self.fn(*[quantities[n] for n in self.needs], **self.numbers)

    @property
    def bound(self) -> Callable:
        """The plain function with its numbers filled in."""
        return partial(self.fn, **self.numbers)


def part(fn: Callable, **numbers) -> Part:
    """Bind numbers to `fn`; reject one that it does not take, demand one that it must have."""
    takes = {n: p for n, p in signature(fn).parameters.items() if p.kind is Parameter.KEYWORD_ONLY}
    for name in numbers.keys() - takes.keys():
        hint = nearest(name, takes)
        raise ValueError(f"{fn.__name__} takes no {name!r}. {hint}Numbers here: {', '.join(takes) or 'none'}.")
    for name in [n for n, p in takes.items() if p.default is p.empty and n not in numbers]:
        raise ValueError(f"{fn.__name__} needs a value for {name!r}.")
    return Part(fn, numbers)


@dataclass(frozen=True)
class Snapshot:
    """How a copy of the policy follows it: `decay` is the share that it keeps at a refresh, every `every` updates."""

    decay: float
    every: int = 1
    warmup: bool = False

    def share_kept(self, update: int) -> float:
        """Share of the old value kept at this update (from 1); averages warm up as (1 + n) / (10 + n)."""
        return min(self.decay, (1 + update) / (10 + update)) if self.warmup else self.decay


def frozen() -> Snapshot:
    """The policy as it was at the start; with adapters, the base model without them."""
    return Snapshot(decay=1.0)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """How one prompt becomes N leaves: nothing here can contradict another setting."""

    steps: int  # T
    roots: int  # independent initial noises per prompt
    forks: Mapping[int, int] = field(default_factory=dict)  # {step: children of each state}
    kernel: Part  # what a noisy step draws from
    density: Part  # log-prob of what was drawn
    noisy: Part  # which steps are noisy
    noise: Part  # how the noise of siblings relates
    guidance: float = 1.0  # classifier-free; 1 runs no unconditional pass

    @property
    def leaves(self) -> int:
        return self.roots * prod(self.forks.values())


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that makes one method differ from another; nothing about models, data or budget."""

    rollout: Rollout
    advantage: Part  # reward, group        -> [N]     who did better than their peers
    credit: Part  # advantage, edge      -> [N, T]  which decisions earned it
    select: Part  # noisy, ...           -> [N, T]  which decisions are trained
    weight: Part  # mask                 -> [N, T]  how much each counts
    points: Part  # tree, credit, weight -> Points  where the policy is evaluated
    ratio: Part | None = None  # log_prob pairs       -> [B, K]
    objective: Part  # ratio, advantage     -> [B, K]  what is minimised
    penalties: tuple[tuple[float, Part], ...] = ()  # (coefficient, ... -> [B, K])
    snapshots: Mapping[str, Snapshot] = field(default_factory=dict)  # suffix -> rule

    @property
    def needs(self) -> set[str]:
        """Quantities that the learning step asks the policy or the points for."""
        parts = [self.objective, self.ratio, *(p for _, p in self.penalties)]
        return {n for p in parts if p for n in p.needs} - {"ratio"}

    @property
    def skips_zero_advantage(self) -> bool:
        """Whether rows of advantage 0 leave no gradient and may be left out."""
        return not self.penalties and getattr(self.objective.fn, "silent", False)

    def but(self, *, rollout: Mapping | None = None, **changes) -> "Recipe":
        """This recipe with some roles refilled; `rollout` takes a dict of its own changes."""
        return replace(self, rollout=replace(self.rollout, **(rollout or {})), **changes)

    def check(self) -> "Recipe":
        """Itself, or a ValueError that names the role that cannot work."""
        if self.rollout.leaves < 2:
            raise ValueError(
                f"rollout.roots = {self.rollout.roots} makes groups of one: a group needs at least 2 rollouts, "
                "or all advantages are 0. Raise rollout.roots or add rollout.forks."
            )
        if not self.rollout.guidance >= 1:
            raise ValueError(f"rollout.guidance = {self.rollout.guidance}: expected 1 (none) or more.")
        for role, filled in self.parts():
            self._check_part(role, filled)
        asked = {vocabulary.split(name)[1] for name in self.needs - {"log_prob_old"}} - {vocabulary.CURRENT}
        for suffix in self.snapshots.keys() - asked:
            raise ValueError(f"snapshots.{suffix} has no effect: no part asks for a quantity that ends in _{suffix}.")
        for suffix in asked - self.snapshots.keys():
            raise ValueError(f"a part asks for a quantity that ends in _{suffix}, but snapshots has no {suffix!r}.")
        return self

    def parts(self) -> list[tuple[str, Part]]:
        """(role, part) in the order in which they act."""
        found = []
        for owner, prefix in ((self.rollout, "rollout."), (self, "")):
            found += [(prefix + f.name, v) for f in fields(owner) if isinstance(v := getattr(owner, f.name), Part)]
        return found + [(f"penalties.{p.name}", p) for _, p in self.penalties]

    def _check_part(self, role, filled):
        where = role.split(".")[-1] if role.startswith("rollout.") else role.split(".")[0]
        known = AVAILABLE.get(where, _ROWS)
        takes = signature(filled.fn).parameters.values()
        for number in (p.name for p in takes if p.kind is p.KEYWORD_ONLY and p.default is p.empty):
            if number not in filled.numbers:
                raise ValueError(f"{role}: {filled.name} needs a value for {number!r}: set {role}.{number}.")
        for name in filled.needs:
            quantity = name if where in AVAILABLE else _without_suffix(name)
            if quantity not in known:
                raise ValueError(
                    f"{role}: {filled.name} asks for {name!r}. {nearest(name, known)}Known there: {', '.join(known)}."
                )
        if "ratio" in filled.needs and self.ratio is None:
            raise ValueError(f"{role}: {filled.name} asks for the ratio, but the recipe has none.")


def _without_suffix(name):
    """The quantity that a name stands for; a name that stands for none, as it is."""
    try:
        return vocabulary.split(name)[0]
    except ValueError:
        return name


_SCHEDULE = ("steps", "iteration", "generator")
_LEAVES = ("reward", "reward_weight", "group", "prompt")
_TABLE = (*_LEAVES, "edge", "noisy", "sigmas", "steps", "iteration", "generator")
_ROWS = ("advantage", "weight", "step", "sigma", "sigma_next", "latents", "next_latents")
_ROWS += ("velocity", "mean", "std", "log_prob", "ratio")
AVAILABLE = {  # what is known when a role acts; roles not listed see a row's quantities and those of snapshots
    "kernel": ("latents", "velocity", "sigma", "sigma_next", "sigmas", "step", "steps"),
    "density": ("next_latents", "mean", "std"),
    "noisy": _SCHEDULE,
    "noise": ("own", "shared"),
    "advantage": _LEAVES,
    "credit": (*_TABLE, "advantage"),
    "select": (*_TABLE, "advantage"),
    "weight": (*_TABLE, "advantage", "mask"),
    "points": ("tree", "advantage", "weight"),
}
