"""From the table of an update to what each decision earns and how much it counts.  The same for images and text."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowrl.advantages.outcome import raw
from flowrl.groups import group_spread
from flowrl.recipe import Recipe


def assign(
    recipe: Recipe,
    reward: Float[Tensor, "N R"],
    reward_weight: Float[Tensor, " R"],
    valid: Bool[Tensor, " N"],
    group: Int[Tensor, " N"],
    edge: Int[Tensor, "N T"],
    noisy: Float[Tensor, "N T"],
    **schedule,
) -> tuple[Float[Tensor, "N T"], Float[Tensor, "N T"], dict[str, float | int]]:
    """(advantage, weight, log) over the rollouts of *all* ranks, so that no rule has to know about processes.

    schedule: sigmas, steps, iteration and the generator of the `select` role. Rollouts whose score failed are taken out
    of the table: they leave the statistics of their group, and get advantage and weight 0.
    """
    known = {"reward_weight": reward_weight} | schedule
    known |= {"reward": reward[valid], "group": group[valid], "prompt": group[valid]}
    known |= {"edge": edge[valid], "noisy": noisy[valid]}
    outcome = known["advantage"] = recipe.advantage(**known)
    known["mask"] = recipe.select(**known)
    credit, weight = recipe.credit(**known), recipe.weight(**known)
    for role, table in (("select", known["mask"]), ("credit", credit), ("weight", weight)):
        if table.shape != known["noisy"].shape:
            name = getattr(recipe, role).name
            raise ValueError(
                f"{role}: {name} returned {list(table.shape)}, expected [N, T] = {list(known['noisy'].shape)}."
            )
    assert not bool((known["mask"] > known["noisy"]).any()), "a deterministic step has no log-prob to train on"
    equal = group_spread(raw(reward[valid], reward_weight), group[valid]) == 0
    log = {
        "group/zero_spread": _share_of_groups(equal, group[valid]),
        "advantage/max": float(outcome.abs().max()) if len(outcome) else 0.0,
        "reward/invalid": int((~valid).sum()),
    }
    return _put_back(credit, valid), _put_back(weight, valid), log


def _share_of_groups(flag, group):
    """Share of the groups whose rows carry the flag."""
    groups = group.unique()
    return len(group[flag].unique()) / max(len(groups), 1)


def _put_back(rows, valid):
    out = rows.new_zeros(len(valid), *rows.shape[1:])
    out[valid] = rows
    return out
