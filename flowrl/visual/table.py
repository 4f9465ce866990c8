"""From scored leaves to what they earned: the small tables of all ranks, on every rank."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl import randomness, vocabulary
from flowrl.assign import Assigned, Leaves, assign, reward_shares
from flowrl.objectives.chunks import relative_change
from flowrl.recipe import Recipe
from flowrl.visual.ranks import Ranks
from rewards.table import RewardTable
from samplers import RolloutTree, kernels
from samplers.layout import depths


def of_kernel(recipe: Recipe, sigmas: Tensor, noisy: Mapping[int, int]) -> dict[str, Tensor]:
    """stds and slopes of the kernel at every step, as if it drew noise there; nothing where no part asks for them."""
    if not {"stds", "slopes"} & recipe.asks:
        return {}
    plan = recipe.rollout
    depth = depths(len(sigmas) - 1, noisy, apart=plan.apart)
    return dict(zip(("stds", "slopes"), kernels.scales(plan.kernel.bound, sigmas, depth=depth), strict=True))


def earned(
    recipe: Recipe,
    tree: RolloutTree,
    noisy: Mapping[int, int],
    table: RewardTable,
    prompts: Sequence[int],
    memory: Mapping[str, Tensor],
    ranks: Ranks,
    *,
    seed: int,
    iteration: int,
    state_reward: Float[Tensor, "N T1"] | None = None,
    tracked: Mapping[str, Tensor] | None = None,
) -> Assigned:
    """What this rank's leaves earned, computed on the table of all ranks; memory is the same on all of them."""
    leaves = _leaves(recipe, tree, table, prompts, noisy, ranks, state_reward)
    rows, valid = ranks.place(tree.edge)[1], ranks.gather(table.valid)
    found = assign(
        recipe,
        leaves,
        table.weight,
        valid,
        memory,
        tracked=tracked,
        sigmas=tree.sigmas,
        **of_kernel(recipe, tree.sigmas, noisy),
        steps=len(tree.sigmas) - 1,
        iteration=iteration,
        generator=randomness.generator(seed, iteration, "select"),
        update_generator=randomness.generator(seed, iteration, "minibatches"),
    )
    log = found.log
    if valid.any():
        log |= _said(table, leaves.reward[valid], leaves.group[valid])
    tracked = {name: x[rows] if vocabulary.per_rollout(name) else x for name, x in found.tracked.items()}
    mine = {"valid": table.valid, "advantage": found.advantage[rows]}
    mine |= {"weights": tuple(w[rows] for w in found.weights), "tracked": tracked}
    return replace(found, **mine, log=log)


def _leaves(recipe, tree, table, prompts, noisy, ranks, state_reward):
    """The table of all ranks; what is large is gathered only where a role asks for it."""
    before = ranks.gather(torch.tensor([[len(tree.source), int(tree.root.max()) + 1]]))[: ranks.index].sum(0)
    group, asked = ranks.gather(tree.group), recipe.asks
    found = {
        "reward": table.value,
        "root": tree.root + before[1],
        "edge": torch.where(tree.edge >= 0, tree.edge + before[0], -1),
        "noisy": _on_path(tree, tree.noisy, False).to(table.value.dtype),
    }
    if "log_prob_old" in asked:
        found["log_prob_old"] = _on_path(tree, tree.log_prob.cpu(), torch.nan)
    if "change" in asked:
        found["change"] = _on_path(tree, _change(tree), 0.0)
    if state_reward is not None:
        found["state_reward"] = state_reward
    prompt = torch.tensor(prompts)[group // recipe.rollout.branches(noisy)]
    return Leaves(group=group, prompt=prompt, **{name: ranks.gather(x) for name, x in found.items()})


def _said(table, reward, group):
    """What to log of the scores that are valid."""
    log = {}
    for name, column in zip(table.names, reward.T, strict=True):
        log |= {f"reward/{name}": float(column.mean()), f"reward_std/{name}": float(column.std(unbiased=False))}
    if len(table.names) > 1:
        shares = reward_shares(reward, table.weight, group).tolist()
        log |= {f"reward_share/{name}": share for name, share in zip(table.names, shares, strict=True)}
    return log


def _on_path(tree, per_edge, absent):
    """[E] -> [N, T]: of the edges that each leaf took."""
    return torch.where(tree.edge >= 0, per_edge[tree.edge], absent)


def _change(tree):
    """How far each kept edge moved the latents, relative to their size; a few at a time, since latents are large."""
    kept = (tree.source >= 0) & (tree.target >= 0)
    found, device = torch.zeros(len(kept)), tree.states.device
    for edges in kept.nonzero()[:, 0].split(64):
        before, after = (tree.states[x[edges].to(device)][:, None] for x in (tree.source, tree.target))
        found[edges] = relative_change(before, after)[:, 0].float().cpu()
    return found
