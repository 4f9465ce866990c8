"""From the table of an iteration to what each decision earns and how much it counts.  The same for images and text."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowrl.advantages.outcome import raw
from flowrl.groups import group_centre, group_spread
from flowrl.recipe import Recipe


@dataclass(frozen=True)
class Assigned:
    """What the decisions of an iteration earned, and how much each counts in each of its optimizer updates."""

    advantage: Float[Tensor, "N T"]
    weights: tuple[Float[Tensor, "N T"], ...]  # one per optimizer update, each summing to 1 over all ranks
    kept: tuple[float, ...]  # flowrl.updates.Planned.kept of each
    log: dict[str, float | int]


def assign(
    recipe: Recipe,
    reward: Float[Tensor, "N R"],
    reward_weight: Float[Tensor, " R"],
    valid: Bool[Tensor, " N"],
    group: Int[Tensor, " N"],
    edge: Int[Tensor, "N T"],
    noisy: Float[Tensor, "N T"],
    *,
    update_generator: torch.Generator,
    **schedule,
) -> Assigned:
    """Advantage and weights over the rollouts of *all* ranks, so that no rule has to know about processes.

    schedule: sigmas, steps, iteration and the generator of the `select` role. Rollouts whose score failed are taken out
    of the table: they leave the statistics of their group, and get advantage and weight 0.
    """
    known = {"reward_weight": reward_weight} | schedule
    known |= {"reward": reward[valid], "group": group[valid], "prompt": group[valid]}
    known |= {"edge": edge[valid], "noisy": noisy[valid]}
    outcome = known["advantage"] = recipe.advantage(**known)
    known["mask"] = _checked(recipe, "select", recipe.select(**known), known["noisy"])
    credit = _checked(recipe, "credit", recipe.credit(**known), known["noisy"])
    planned = recipe.update(**known | {"generator": update_generator})
    weights = [_weight(recipe, known, one.leaves) for one in planned]
    log = {
        "group/zero_spread": _share_equal(known, reward_weight),
        "advantage/max": float(outcome.abs().max()) if len(outcome) else 0.0,
        "reward/invalid": int((~valid).sum()),
    }
    weights = tuple(_put_back(weight, valid) for weight in weights)
    return Assigned(_put_back(credit, valid), weights, tuple(one.kept for one in planned), log)


def reward_shares(
    reward: Float[Tensor, "N R"], reward_weight: Float[Tensor, " R"], group: Int[Tensor, " N"]
) -> Float[Tensor, " R"]:
    """Share of each reward, times its weight, in the variance within groups, as if they varied independently; or 0."""
    variance = (group_centre(reward, group) * reward_weight).square().mean(0)
    return variance / variance.sum().clamp(min=torch.finfo(variance.dtype).tiny)


_OF_LEAVES = ("reward", "group", "prompt", "edge", "noisy", "advantage", "mask")


def _weight(recipe, known, leaves):
    """Weights of one optimizer update: those of the leaves that it sees, 0 elsewhere."""
    seen = known | {name: known[name][leaves] for name in _OF_LEAVES}
    return _put_back(_checked(recipe, "weight", recipe.weight(**seen), seen["noisy"]), leaves)


def _checked(recipe, role, table, like):
    if table.shape != like.shape:
        name = getattr(recipe, role).name
        raise ValueError(f"{role}: {name} returned {list(table.shape)}, expected [N, T] = {list(like.shape)}.")
    return table


def _share_equal(known, reward_weight):
    """Share of the groups whose rewards are all equal."""
    group = known["group"]
    equal = group_spread(raw(known["reward"], reward_weight), group) == 0
    return len(group[equal].unique()) / max(len(group.unique()), 1)


def _put_back(rows, kept):
    out = rows.new_zeros(len(kept), *rows.shape[1:])
    out[kept] = rows
    return out
