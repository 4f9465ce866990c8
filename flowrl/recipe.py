"""A method is a Recipe: which pure function fills each role, and with what numbers."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from math import prod

from flowrl import decays, vocabulary
from flowrl.part import Part, part
from flowrl.recipe_check import check_recipe


@dataclass(frozen=True)
class Snapshot:
    """How a copy of the policy follows it: every `every` updates it keeps a share `decay` of itself.

    decay:    refresh (from 1) -> share kept; None: never refreshed
    guidance: classifier-free guidance of its own; None: that of the rollout
    """

    decay: Part | None
    every: int = 1
    guidance: float | None = None

    def share_kept(self, update: int) -> float:
        """Share of its old value that it keeps after this update (from 1); 1 where it stays as it is."""
        if self.decay is None or update % self.every:
            return 1.0
        return self.decay(refresh=update // self.every)


def frozen(guidance: float | None = None) -> Snapshot:
    """The policy as it was at the start; with adapters, the base model without them."""
    return Snapshot(None, guidance=guidance)


def copied(every: int = 1, guidance: float | None = None) -> Snapshot:
    """The policy as it was at the last refresh."""
    return Snapshot(part(decays.constant, share=0.0), every, guidance)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """How one prompt becomes N leaves: nothing here can contradict another setting."""

    steps: int  # T
    roots: int  # independent initial noises per prompt
    forks: Mapping[int, int] | Part = field(default_factory=dict)  # {step: children of each state}, or noisy -> that
    apart: bool = False  # every noisy step leaves the deterministic path by itself
    strides: tuple[int, ...] = (1,)  # apart: each jump is finished, and scored, over every stride-th level for each
    candidates: bool = False  # of the children of a fork a random one goes on
    kernel: Part | None = None  # what a noisy step draws from
    density: Part | None = None  # log-prob of what was drawn
    noisy: Part | None = None  # which steps are noisy [and how many they span]; none: all follow the ODE
    noise: Part | None = None  # how the noise of siblings relates
    solver: Part | None = None  # multi-step, in place of Euler steps after the last noisy one
    tail: Part | None = None  # sigmas, after -> the grid with another end after the last noisy step
    guidance: float = 1.0  # classifier-free; 1 runs no unconditional pass
    by: str = "current"  # who draws: "current" or a snapshot's name
    by_after: int = 0  # updates before `by` takes over from the current policy

    def forks_at(self, noisy: Collection[int]) -> Mapping[int, int]:
        """{step: children of each state} where these steps are noisy."""
        return self.forks(noisy=tuple(noisy)) if isinstance(self.forks, Part) else self.forks

    def leaves(self, noisy: Collection[int]) -> int:
        """Finished rollouts of each prompt where these steps are noisy."""
        forks = {} if self.candidates else self.forks_at(noisy)
        children = [forks.get(t, 1) for t in noisy]
        return self.roots * (sum(children) * len(self.strides) if self.apart and children else prod(children))

    def branches(self, noisy: Collection[int]) -> int:
        """Comparison sets of each prompt where these steps are noisy."""
        return len(noisy) * len(self.strides) if self.apart else 1

    def drawn_by(self, iteration: int) -> str:
        """Who draws in the update of this number (from 0)."""
        return self.by if iteration >= self.by_after else "current"


@dataclass(frozen=True, kw_only=True)
class Noising:
    """How finished pictures are noised again, for methods that train on the forward process."""

    draws: int  # pairs of a noise level and a noise per picture
    times: Part  # the noise levels
    elbo: Part | None = None  # error of the velocity there
    shared: bool = False  # pictures of one group get the same pairs


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that makes one method differ from another; nothing about models, data or budget."""

    rollout: Rollout
    noising: Noising | None = None  # only where points are taken on noise
    allocate: Part | None = None  # memory             -> prompts, roots each  what an update rolls out
    pilot: Part | None = None  # score of candidates    -> which prompt is rolled out
    estimate: Part | None = None  # latents, sigma -> (latents, sigma)     what states on the way are scored by
    track: Part | None = None  # reward, memory       -> more, memory  what updates learn from those before
    advantage: Part  # reward, group        -> [N]     who did better than their peers
    credit: Part  # advantage, edge      -> [N, T]  which decisions earned it
    chunks: Part | None = None  # steps                -> [T]     which steps are trained as one
    select: Part  # noisy, ...           -> [N, T]  which decisions are trained
    update: Part  # group                -> optimizer updates, in order
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
    def recorded(self) -> set[str]:
        """Names of the policy that drew: log_prob_old, and elbo_old and mean_old unless a snapshot is called `old`."""
        return {"log_prob_old"} if "old" in self.snapshots else {"log_prob_old", "elbo_old", "mean_old"}

    @property
    def asks(self) -> set[str]:
        """Quantities that the roles ask for which work on the table of an iteration."""
        parts = [self.track, self.advantage, self.credit, self.chunks, self.select, self.update, self.weight]
        return {n for p in parts if p for n in p.needs}

    @property
    def gives(self) -> tuple[str, ...]:
        """Quantities that the tracker adds."""
        return getattr(self.track.fn, "gives", ()) if self.track else ()

    @property
    def suffixes(self) -> set[str]:
        """Snapshots that a part asks for."""
        return {vocabulary.split(name)[1] for name in self.needs - self.recorded} - {vocabulary.CURRENT}

    @property
    def couples(self) -> bool:
        """Whether a row's loss depends on other rows, so that an update takes two passes."""
        return getattr(self.objective.fn, "couples", False)

    @property
    def scales_each_reward(self) -> bool:
        """Whether the advantage brings every reward to one scale before they are summed."""
        return getattr(self.advantage.fn, "scales_each", False)

    @property
    def skips_zero_advantage(self) -> bool:
        """Whether rows of advantage 0 leave no gradient, in themselves or in others, and may be left out."""
        return not self.couples and not self.penalties and getattr(self.objective.fn, "silent", False)

    def but(self, *, rollout: Mapping | None = None, **changes) -> "Recipe":
        """This recipe with some roles refilled; `rollout` takes a dict of its own changes."""
        return replace(self, rollout=replace(self.rollout, **(rollout or {})), **changes)

    def check(self) -> "Recipe":
        """Itself, or a ValueError that names the role that cannot work."""
        check_recipe(self)
        return self

    def parts(self) -> list[tuple[str, Part]]:
        """(role, part) in the order in which they act."""
        found = []
        for owner, prefix in ((self.rollout, "rollout."), (self.noising, "noising."), (self, "")):
            named = [(prefix + f.name, getattr(owner, f.name)) for f in fields(owner)] if owner else []
            found += [(role, value) for role, value in named if isinstance(value, Part)]
        found += [(f"penalties.{p.name}", p) for _, p in self.penalties]
        return found + [(f"snapshots.{name}.decay", s.decay) for name, s in self.snapshots.items() if s.decay]
