"""From the table of an iteration to what each decision earns and how much it counts.  The same for images and text."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowrl.advantages.outcome import raw
from flowrl.groups import group_centre, group_spread
from flowrl.recipe import Recipe
from flowrl.vocabulary import per_rollout


@dataclass(frozen=True)
class Leaves:
    """What is known of the rollouts of *all* ranks, so that no rule has to know about processes; a row each."""

    reward: Float[Tensor, "N R"]
    group: Int[Tensor, " N"]
    prompt: Int[Tensor, " N"]
    root: Int[Tensor, " N"]
    edge: Int[Tensor, "N T"]
    noisy: Float[Tensor, "N T"]
    log_prob_old: Float[Tensor, "N T"] | None = None  # the rest where a role asks for it
    change: Float[Tensor, "N T"] | None = None
    state_reward: Float[Tensor, "N T1"] | None = None

    def of(self, kept: Bool[Tensor, " N"]) -> dict[str, Tensor]:
        """By name, the kept rows only."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: x[kept] for name, x in columns.items() if x is not None}


@dataclass(frozen=True)
class Assigned:
    """What the decisions of an iteration earned, and how much each counts in each of its optimizer updates."""

    valid: Bool[Tensor, " N"]  # False: the score failed; no advantage, no weight, nothing that the tracker gave
    advantage: Float[Tensor, "N T"]
    weights: tuple[Float[Tensor, "N T"], ...]  # one per optimizer update, each summing to 1 over all ranks
    trained: tuple[bool, ...]  # whether any decision of any rank counts in each
    kept: tuple[float, ...]  # flowrl.updates.Planned.kept of each
    chunk: Int[Tensor, " T"] | None  # of each step, where the recipe trains chunks
    tracked: Mapping[str, Tensor]  # what the tracker gave, a row per rollout or one number
    memory: Mapping[str, Tensor]  # what is remembered once the iteration is complete
    log: dict[str, float | int]


def assign(
    recipe: Recipe,
    leaves: Leaves,
    reward_weight: Float[Tensor, " R"],
    valid: Bool[Tensor, " N"],
    memory: Mapping[str, Tensor],
    *,
    update_generator: torch.Generator,
    tracked: Mapping[str, Tensor] | None = None,
    **schedule,
) -> Assigned:
    """Advantage and weights of every rollout.

    schedule: sigmas, steps, iteration, stds and slopes, and the generator of the `select` role. Rollouts whose score
    failed are taken out of the table: they leave the statistics of their group, and get advantage and weight 0.
    tracked: what the tracker gave of pictures drawn before; by default it looks at these
    """
    known = {"reward_weight": reward_weight, "memory": memory} | schedule | leaves.of(valid)
    known["divergence"] = memory.get("divergence", torch.zeros(()))  # of the iteration before
    if tracked is None:
        tracked, memory = recipe.track(**known) if recipe.track and valid.any() else ({}, memory)
    known |= tracked
    if recipe.chunks:
        known["chunk"] = recipe.chunks(**known)
    log = {"group/zero_spread": _share_equal(known), "reward/invalid": int((~valid).sum())}
    if valid.any():
        credit, weights, kept = _earned(recipe, known, update_generator)
    else:
        planned = recipe.update(**known | {"generator": update_generator})
        credit, kept = torch.zeros_like(known["noisy"]), tuple(one.kept for one in planned)
        weights = [credit] * len(planned)
    log["advantage/max"] = float(known["advantage"].abs().max()) if "advantage" in known else 0.0
    weights = tuple(_put_back(weight, valid) for weight in weights)
    return Assigned(
        valid=valid,
        advantage=_put_back(credit, valid),
        weights=weights,
        trained=tuple(bool(weight.any()) for weight in weights),
        kept=kept,
        chunk=known.get("chunk"),
        tracked={n: _put_back(x, valid) if per_rollout(n) else x for n, x in tracked.items()},
        memory=memory,
        log=log,
    )


def reward_shares(
    reward: Float[Tensor, "N R"], reward_weight: Float[Tensor, " R"], group: Int[Tensor, " N"]
) -> Float[Tensor, " R"]:
    """Share of each reward, times its weight, in the variance within groups, as if they varied independently; or 0."""
    variance = (group_centre(reward, group) * reward_weight).square().mean(0)
    return variance / variance.sum().clamp(min=torch.finfo(variance.dtype).tiny)


def _earned(recipe, known, update_generator):
    """(credit, weight of each optimizer update, where each starts); the outcome and the mask join what is known."""
    known["advantage"] = recipe.advantage(**known)
    known["mask"] = _checked(recipe, "select", recipe.select(**known), known["noisy"])
    credit = _checked(recipe, "credit", recipe.credit(**known), known["noisy"])
    planned = recipe.update(**known | {"generator": update_generator})
    return credit, [_weight(recipe, known, one.leaves) for one in planned], tuple(one.kept for one in planned)


def _weight(recipe, known, leaves):
    """Weights of one optimizer update: those of the leaves that it sees, 0 elsewhere."""
    seen = {name: x[leaves] if per_rollout(name) else x for name, x in known.items()}
    return _put_back(_checked(recipe, "weight", recipe.weight(**seen), seen["noisy"]), leaves)


def _checked(recipe, role, table, like):
    if table.shape != like.shape:
        name = getattr(recipe, role).name
        raise ValueError(f"{role}: {name} returned {list(table.shape)}, expected [N, T] = {list(like.shape)}.")
    return table


def _share_equal(known):
    """Share of the groups whose rewards are all equal."""
    group = known["group"]
    equal = group_spread(raw(known["reward"], known["reward_weight"]), group) == 0
    return len(group[equal].unique()) / max(len(group.unique()), 1)


def _put_back(rows, kept):
    out = rows.new_zeros(len(kept), *rows.shape[1:])
    out[kept] = rows
    return out
