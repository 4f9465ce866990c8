"""The loop body: prompts -> tree -> rewards -> advantages -> points -> update."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl import randomness
from flowrl.assign import assign
from flowrl.recipe import Recipe
from flowrl.train_step import train_step
from flowrl.visual.evaluate import evaluate
from flowrl.visual.policy import Example, Policy
from rewards.table import RewardTable
from samplers import RolloutTree, rollout

Score = Callable[[Tensor, Sequence[Example], Tensor], RewardTable]  # images, example of each, group of each


@dataclass(frozen=True)
class Ranks:
    """What the loop needs to know of other processes: where this one's rows lie, and how to see everybody's."""

    index: int = 0
    count: int = 1
    gather: Callable[[Tensor], Tensor] = lambda rows: rows  # [n, ...] of this rank -> [sum of n, ...], in rank order

    def share(self, items: Sequence) -> tuple[int, Sequence]:
        """(position of the first, this rank's contiguous slice): in rank order the slices make up the whole."""
        bounds = [len(items) * r // self.count for r in (self.index, self.index + 1)]
        return bounds[0], items[bounds[0] : bounds[1]]


def update(
    policy: Policy,
    recipe: Recipe,
    examples: Sequence[Example],
    score: Score,
    learner,
    *,
    seed: int,
    iteration: int,
    batch_size: int,
    ranks: Ranks | None = None,
) -> dict[str, float | int | str]:
    """One update of any visual recipe on `examples`, one group each; returns what to log.

    learner:    see train_step; its optimiser holds policy.trainable()
    batch_size: rows per network call of the rollout
    """
    ranks = ranks or Ranks()
    first, mine = ranks.share(examples)
    named = {"seed": seed, "iteration": iteration}
    before = policy.forwards
    tree, noisy = roll_out(policy, recipe, mine, **named, first_group=first, batch_size=batch_size)
    rollout_calls = (policy.forwards - before) // (2 if recipe.rollout.guidance > 1 else 1)
    table = score(policy.decode(tree.leaves()), [mine[g - first] for g in tree.group.tolist()], tree.group)
    advantage, weight, log = _assign(recipe, tree, noisy, table, ranks, **named)

    points = recipe.points(tree=tree, advantage=advantage, weight=weight)
    if recipe.skips_zero_advantage:
        points = points.where(points.columns["advantage"][:, 0] != 0)
    watch = _Deviation()
    log |= train_step(recipe, points, watch(policy, recipe, tree.sigmas), learner)
    log |= {"rollout_calls": rollout_calls, "train_calls": points.calls}
    return log | {"ratio/deviation": watch.worst}


def roll_out(
    policy: Policy,
    recipe: Recipe,
    examples: Sequence[Example],
    *,
    seed: int,
    iteration: int,
    first_group: int = 0,
    batch_size: int | None = None,
) -> tuple[RolloutTree, tuple[int, ...]]:
    """(tree, noisy steps): every example becomes `roots` trees of one group, numbered from `first_group` on."""
    plan = recipe.rollout
    noisy = noisy_steps(recipe, seed, iteration)
    group = first_group + torch.arange(len(examples)).repeat_interleave(plan.roots)
    members = [(g, m) for g in range(first_group, first_group + len(examples)) for m in range(plan.roots)]
    noise = [policy.noise(1, randomness.generator(seed, iteration, "initial noise", *m)) for m in members]
    policy.guidance = plan.guidance  # before the prompts: with guidance their negatives are encoded too
    prompt = policy.encode(examples).repeat_interleave(plan.roots)
    sigmas = policy.sigmas(plan.steps)
    tree = rollout(
        policy.velocity,
        torch.cat(noise),
        prompt,
        sigmas,
        plan.kernel.bound,
        noisy=noisy,
        forks=plan.forks,
        density=plan.density.bound,
        noise=plan.noise.bound,
        generators=[randomness.generator(seed, iteration, "step noise", *m) for m in members],
        group=group,
        batch_size=batch_size,
    )
    return tree, noisy


def noisy_steps(recipe: Recipe, seed: int, iteration: int) -> tuple[int, ...]:
    """The steps that draw noise at this iteration, the same on every rank."""
    named = randomness.generator(seed, iteration, "noise plan")
    return recipe.rollout.noisy(steps=recipe.rollout.steps, iteration=iteration, generator=named)


def _assign(recipe, tree, noisy, table, ranks, seed, iteration):
    """Advantage and weight of this rank's leaves, computed on the table of all ranks."""
    edges = ranks.gather(torch.tensor([len(tree.source)]))
    edge = ranks.gather(torch.where(tree.edge >= 0, tree.edge + int(edges[: ranks.index].sum()), -1))
    reward, valid, group = (ranks.gather(x) for x in (table.value, table.valid, table.group))
    drawn = torch.zeros(edge.shape, dtype=reward.dtype).index_fill_(1, torch.tensor(noisy, dtype=torch.long), 1.0)
    advantage, weight, log = assign(
        recipe,
        reward,
        table.weight,
        valid,
        group,
        edge,
        drawn,
        sigmas=tree.sigmas,
        steps=recipe.rollout.steps,
        iteration=iteration,
        generator=randomness.generator(seed, iteration, "select"),
    )
    for name, column in zip(table.names, reward.T if valid.any() else (), strict=bool(valid.any())):
        log[f"reward/{name}"] = float(column[valid].mean())
        log[f"reward_std/{name}"] = float(column[valid].std(unbiased=False))
    counts = ranks.gather(torch.tensor([len(tree.edge)]))
    start = int(counts[: ranks.index].sum())
    rows = slice(start, start + len(tree.edge))
    return advantage[rows], weight[rows], log


class _Deviation:
    """Largest |ratio - 1| between the recorded log-prob and the one that training computes before it has moved."""

    def __init__(self):
        self._seen = []

    def __call__(self, policy, recipe, sigmas):
        def evaluated(rows, names):
            q = evaluate(policy, rows, names, recipe.rollout.kernel, recipe.rollout.density, sigmas)
            self._seen.append((q["log_prob_old"] - q["log_prob_recorded"]).exp().sub(1).abs().max())
            return q

        return evaluated

    @property
    def worst(self) -> float:
        return float(torch.stack(self._seen).max()) if self._seen else 0.0
