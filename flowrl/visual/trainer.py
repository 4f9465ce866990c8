"""The loop body: prompts -> tree -> rewards -> advantages -> points -> optimizer updates."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from flowrl import randomness, vocabulary
from flowrl.assign import Assigned, assign, reward_shares
from flowrl.recipe import Recipe
from flowrl.train_step import train_step
from flowrl.visual.duplicates import refuse_duplicates
from flowrl.visual.evaluate import evaluate
from flowrl.visual.points import Drawn
from flowrl.visual.policy import Example, Policy, uncounted
from flowrl.visual.ranks import Ranks, in_step, is_spare
from rewards.table import RewardTable
from samplers import RolloutTree, rollout

Score = Callable[[Tensor, Sequence[Example], Tensor], RewardTable]  # images, example of each, group of each


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
    """One iteration of any visual recipe: a rollout of `examples`, a group each, and its optimizer updates.

    Returns what to log. Snapshots follow at its end; they are taken before the first one by policy.snapshot(..., 0).

    learner:    see train_step; its optimiser holds policy.trainable()
    batch_size: rows per network call of the rollout
    """
    ranks = ranks or Ranks()
    first, mine = ranks.share(examples)
    named = {"seed": seed, "iteration": iteration}
    before = policy.forwards
    with policy.at(recipe.rollout.drawn_by(iteration)):
        tree, noisy = roll_out(policy, recipe, mine, **named, first_group=first, batch_size=batch_size, ranks=ranks)
    if iteration == 0:
        refuse_duplicates(tree, examples)
    rollout_calls = (policy.forwards - before) // (2 if recipe.rollout.guidance > 1 else 1)
    table = score(policy.decode(tree.leaves()), [mine[g - first] for g in tree.group.tolist()], tree.group)
    assigned = _assign(recipe, tree, noisy, table, ranks, **named)
    log = assigned.log | {"rollout_calls": rollout_calls}
    log |= learn(policy, recipe, tree, assigned, learner, ranks, **named)
    for name, rule in recipe.snapshots.items():
        policy.snapshot(name, rule, iteration + 1)
    return log


def learn(
    policy: Policy,
    recipe: Recipe,
    tree: RolloutTree,
    assigned: Assigned,
    learner,
    ranks: Ranks,
    *,
    seed: int,
    iteration: int,
) -> dict[str, float | int | str]:
    """The optimizer updates of one rollout, in order; what to log is the mean over them, of calls the sum.

    The first is on-policy if the current policy drew; the others compare with what the policy that drew had recorded.
    """
    on_policy = recipe.rollout.drawn_by(iteration) == "current"
    views = {"tree": tree, "advantage": assigned.advantage}
    if recipe.noising:
        views["drawn"] = draw_levels(recipe, tree, seed=seed, iteration=iteration)
        if "elbo_old" in recipe.needs & recipe.recorded and not (on_policy and len(assigned.weights) == 1):
            with policy.at(recipe.rollout.drawn_by(iteration)):
                views["drawn"] = _record(policy, recipe, views, assigned.weights, learner)
    learner.begin(iteration, restorable=min(assigned.kept) < 1)
    watch, logs, calls = _Watch(recipe), [], 0
    for number, (weight, kept) in enumerate(zip(assigned.weights, assigned.kept, strict=True)):
        if kept < 1:
            learner.go_back(kept)
        points = recipe.points(**views, weight=weight)
        if recipe.skips_zero_advantage:
            points = points.where((points.columns["advantage"] != 0).any(1))
        fresh = on_policy and number == 0
        logs.append(train_step(recipe, points, watch(policy, tree.sigmas, fresh), learner, ranks.place))
        calls += points.calls
    log = {
        name: _mean([one[name] for one in logs if name in one])
        for name in dict.fromkeys(n for one in logs for n in one)
    }
    log |= {"train_calls": calls, "optimizer_steps": len(logs), "on_policy": on_policy and len(logs) == 1}
    return log | watch.log()


def _mean(values):
    """Of numbers; of words, and of counts that go on from step to step, the last."""
    return values[-1] if isinstance(values[-1], str | int) or len(values) == 1 else sum(values) / len(values)


def roll_out(
    policy: Policy,
    recipe: Recipe,
    examples: Sequence[Example],
    *,
    seed: int,
    iteration: int,
    first_group: int = 0,
    batch_size: int | None = None,
    ranks: Ranks | None = None,
) -> tuple[RolloutTree, tuple[int, ...]]:
    """(tree, noisy steps): every example becomes `roots` trees of one group, numbered from `first_group` on."""
    plan = recipe.rollout
    noisy = noisy_steps(recipe, seed, iteration)
    group = first_group + torch.arange(len(examples)).repeat_interleave(plan.roots)
    members = [(g, m) for g in range(first_group, first_group + len(examples)) for m in range(plan.roots)]
    noise = [policy.noise(1, randomness.generator(seed, iteration, "initial noise", *m)) for m in members]
    prompt = _encode(policy, recipe, examples).repeat_interleave(plan.roots)
    sigmas = policy.sigmas(plan.steps)
    bound = {
        name: getattr(plan, name).bound for name in ("kernel", "density", "noise", "solver") if getattr(plan, name)
    }
    tree = rollout(
        in_step(policy, ranks or Ranks(), len(noise), batch_size),
        torch.cat(noise),
        prompt,
        sigmas,
        **bound,
        noisy=noisy,
        forks=plan.forks,
        generators=[randomness.generator(seed, iteration, "step noise", *m) for m in members],
        group=group,
    )
    return tree, noisy


def _encode(policy, recipe, examples):
    """Prompt ids; where the rollout or a snapshot is guided, the negative prompts are encoded too."""
    policy.guidance = max([recipe.rollout.guidance, *(s.guidance or 1.0 for s in recipe.snapshots.values())])
    ids = policy.encode(examples)
    policy.guidance = recipe.rollout.guidance
    return ids


def noisy_steps(recipe: Recipe, seed: int, iteration: int) -> tuple[int, ...]:
    """The steps that draw noise at this iteration, the same on every rank."""
    if recipe.rollout.noisy is None:
        return ()
    named = randomness.generator(seed, iteration, "noise plan")
    return recipe.rollout.noisy(steps=recipe.rollout.steps, iteration=iteration, generator=named)


def draw_levels(recipe: Recipe, tree: RolloutTree, *, seed: int, iteration: int) -> Drawn:
    """Noise levels and noises for every finished picture, by private generators; with `shared`, one set per group."""
    noising, draws = recipe.noising, recipe.noising.draws
    names = [(g,) if noising.shared else (g, member) for g, member in _members(tree.group.tolist())]
    unit = {name: i for i, name in enumerate(dict.fromkeys(names))}
    sigma, noises = [], []
    for name in unit:
        own = randomness.generator(seed, iteration, "noising", *name)
        sigma.append(noising.times(draws=draws, generator=own, sigmas=tree.sigmas))
        noises.append(torch.randn(draws, *tree.states.shape[1:], generator=own))
    of_leaf = torch.tensor([unit[name] for name in names])
    row = of_leaf[:, None] * draws + torch.arange(draws)
    return Drawn(torch.stack(sigma)[of_leaf], row, torch.cat(noises).to(tree.states.dtype))


def _members(group):
    """(group, how many of it came before) of each leaf."""
    seen: dict[int, int] = {}
    for g in group:
        seen[g] = seen.get(g, -1) + 1
        yield g, seen[g]


def _record(policy, recipe, views, weights, learner) -> Drawn:
    """What the policy in force says of every picture that is trained, at its own levels: elbo_old."""
    drawn, trained = views["drawn"], torch.stack(weights).sum(0)
    found = torch.zeros_like(drawn.sigma).flatten()
    evaluated = _Watch(recipe)(policy, views["tree"].sigmas, on_policy=False)
    for rows in learner.micro_batches(recipe.points(**views, weight=trained)):
        q = evaluated(rows, {"elbo"}, gradient=False)
        if not is_spare(rows):
            found[rows["call"].flatten()] = q["elbo"].flatten().cpu()
    return replace(drawn, elbo_old=found.view_as(drawn.sigma))


def _assign(recipe, tree, noisy, table, ranks, seed, iteration):
    """What this rank's leaves earned, computed on the table of all ranks."""
    edges = ranks.gather(torch.tensor([len(tree.source)]))
    edge, rows = ranks.place(torch.where(tree.edge >= 0, tree.edge + int(edges[: ranks.index].sum()), -1))
    reward, valid, group = (ranks.gather(x) for x in (table.value, table.valid, table.group))
    drawn = torch.zeros(edge.shape, dtype=reward.dtype).index_fill_(1, torch.tensor(noisy, dtype=torch.long), 1.0)
    found = assign(
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
        update_generator=randomness.generator(seed, iteration, "minibatches"),
    )
    log = found.log
    for name, column in zip(table.names, reward.T if valid.any() else (), strict=bool(valid.any())):
        log[f"reward/{name}"] = float(column[valid].mean())
        log[f"reward_std/{name}"] = float(column[valid].std(unbiased=False))
    if len(table.names) > 1 and valid.any():
        shares = reward_shares(reward[valid], table.weight, group[valid])
        log |= {f"reward_share/{name}": share for name, share in zip(table.names, shares.tolist(), strict=True)}
    return Assigned(found.advantage[rows], tuple(w[rows] for w in found.weights), found.kept, log)


class _Watch:
    """Looks at what an update evaluates: how far recorded and recomputed log-probs, and the policies, are apart."""

    def __init__(self, recipe):
        needs = sorted(vocabulary.split(name)[::-1] for name in recipe.needs - recipe.recorded)
        self._compared = {suffix: quantity for suffix, quantity in needs if suffix}  # the last: velocity, if asked for
        self._recipe, self._seen, self._apart = recipe, [], {suffix: [] for suffix in self._compared}

    def __call__(self, policy, sigmas, on_policy):
        def evaluated(rows, names, gradient=True):
            with uncounted(policy) if is_spare(rows) else nullcontext():
                q = evaluate(policy, rows, names, self._recipe, sigmas, on_policy=on_policy, gradient=gradient)
            if on_policy and "log_prob" in q and "log_prob_recorded" in q:
                self._seen.append((q["log_prob"].detach() - q["log_prob_recorded"]).exp().sub(1).abs().max())
            for suffix, quantity in self._compared.items():
                if quantity in q and f"{quantity}_{suffix}" in q:
                    apart = q[quantity].detach() - q[f"{quantity}_{suffix}"]
                    self._apart[suffix].append(apart.abs().max())
            return q

        return evaluated

    def log(self) -> dict[str, float]:
        """ratio/deviation: largest |ratio - 1| before training has moved; snapshot/NAME_distance: of what is compared.

        That is the velocity, the mean of a step or the elbo, the largest difference anywhere.
        """
        found = {"ratio/deviation": self._seen}
        found |= {f"snapshot/{suffix}_distance": seen for suffix, seen in self._apart.items()}
        return {name: float(torch.stack(seen).max()) if seen else 0.0 for name, seen in found.items()}
