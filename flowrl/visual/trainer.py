"""The loop body: prompts -> tree -> rewards -> advantages -> points -> optimizer updates."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flowrl import randomness, vocabulary
from flowrl.assign import Assigned
from flowrl.recipe import Recipe
from flowrl.train_step import train_step
from flowrl.visual.duplicates import refuse_duplicates
from flowrl.visual.paths import along_paths, of_best_paths, per_edge, score_finished
from flowrl.visual.pilot import pilot
from flowrl.visual.points import Column, Drawn
from flowrl.visual.policy import Example, Policy
from flowrl.visual.ranks import Ranks, in_step, is_spare
from flowrl.visual.score import Score
from flowrl.visual.table import earned
from flowrl.visual.watch import Watch
from samplers import RolloutTree, rollout
from samplers.layout import lengths


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
    prompts: Sequence[int] | None = None,
    roots: Sequence[int] | None = None,
    memory: Mapping[str, Tensor] | None = None,
    ranks: Ranks | None = None,
) -> tuple[dict[str, float | int | str], Mapping[str, Tensor]]:
    """One iteration of any visual recipe: a rollout of `examples`, a group each, and its optimizer updates.

    Returns what to log, and the memory for the next iteration. Snapshots follow at its end; they are taken before the
    first one by policy.snapshot(..., 0).

    learner:    see train_step; its optimiser holds policy.trainable()
    batch_size: rows per network call of the rollout
    examples:   with a recipe's pilot those that it chooses among, so many of them for each that is rolled out
    prompts:    number of each example that names its prompt for good; by default its place
    roots:      initial noises of each example; by default those of the recipe
    """
    ranks, memory, before = ranks or Ranks(), memory or {}, policy.forwards
    prompts, given = range(len(examples)) if prompts is None else prompts, None
    if recipe.pilot is not None:
        named = {"seed": seed, "iteration": iteration, "batch_size": batch_size, "ranks": ranks}
        with policy.at(recipe.rollout.drawn_by(iteration)):
            chosen, given, memory = pilot(policy, recipe, examples, score, memory, **named)
        examples, prompts = [examples[i] for i in chosen], [prompts[i] for i in chosen]
    first, mine = ranks.share(examples)
    _, counts = ranks.share(roots or [recipe.rollout.roots] * len(examples))
    named = {"seed": seed, "iteration": iteration}
    with policy.at(recipe.rollout.drawn_by(iteration)):
        more = {"first_group": first, "roots": counts, "batch_size": batch_size, "ranks": ranks}
        tree, noisy = roll_out(policy, recipe, mine, **named, **more)
        of_root = [example for example, count in zip(mine, counts, strict=True) for _ in range(count)]
        of_leaf = [of_root[r] for r in tree.root.tolist()]
        if iteration == 0:
            refuse_duplicates(tree, of_leaf)
        velocity = in_step(policy, ranks, len(of_root), batch_size)
        table = score_finished(tree, of_leaf, policy.decode, score)
        table, states = along_paths(recipe, tree, table, of_leaf, velocity, policy.decode, score)
        columns = of_best_paths(recipe, tree, table, velocity)
    rollout_calls = (policy.forwards - before) // policy.rows_per_state
    known = {"state_reward": states, "tracked": given}
    assigned = earned(recipe, tree, noisy, table, prompts, memory, ranks, **named, **known)
    log = assigned.log | {"rollout_calls": rollout_calls}
    log |= learn(policy, recipe, tree, assigned, learner, ranks, **named, columns=columns)
    memory = assigned.memory
    if "divergence" in log:
        moved = ranks.gather(torch.tensor([log["divergence"]])).sum() / log["optimizer_steps"]
        log["divergence"], memory = float(moved), {**memory, "divergence": moved}
    for name, rule in recipe.snapshots.items():
        policy.snapshot(name, rule, iteration + 1)
    return log, memory


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
    columns: Sequence[Column] = (),
) -> dict[str, float | int | str]:
    """The optimizer updates of one rollout, in order; what to log is the mean over them, of calls the sum.

    The first is on-policy if the current policy drew; the others compare with what the policy that drew had recorded.
    columns: more of what rows are told
    """
    on_policy = recipe.rollout.drawn_by(iteration) == "current"
    views = {"tree": tree, "advantage": assigned.advantage, "chunk": assigned.chunk}
    if recipe.noising:
        views["drawn"] = draw_levels(recipe, tree, seed=seed, iteration=iteration)
        if "elbo_old" in recipe.needs & recipe.recorded and not (on_policy and len(assigned.weights) == 1):
            with policy.at(recipe.rollout.drawn_by(iteration)):
                views["drawn"] = _record(policy, recipe, views, assigned.weights, learner)
    learner.begin(iteration, restorable=min(assigned.kept) < 1)
    numbers = {name: x for name, x in assigned.tracked.items() if not vocabulary.per_rollout(name)}
    tracked = {name: x for name, x in assigned.tracked.items() if name in recipe.needs and name not in numbers}
    more = [*columns, *(Column(name, per_edge(tree, x, assigned.valid)) for name, x in tracked.items())]
    watch, logs, calls = Watch(recipe, numbers), [], 0
    updates = zip(assigned.weights, assigned.trained, assigned.kept, strict=True)
    for number, (weight, trained, kept) in enumerate(updates):
        if kept < 1:
            learner.go_back(kept)
        points = recipe.points(**views, weight=weight)
        for column in more:
            points = points.along(column)
        if recipe.skips_zero_advantage:
            points = points.where((points.columns["advantage"] != 0).any(1))
        fresh = on_policy and number == 0
        evaluated = watch(policy, tree.sigmas, fresh)
        logs.append(train_step(recipe, points, evaluated, learner, ranks.place, trained=trained))
        calls += points.calls
    log = {
        name: _mean([one[name] for one in logs if name in one])
        for name in dict.fromkeys(n for one in logs for n in one)
    }
    log |= {"train_calls": calls, "optimizer_steps": len(logs), "on_policy": on_policy and len(logs) == 1}
    if untrained := assigned.trained.count(False):
        log["skipped_unscored"] = untrained
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
    roots: Sequence[int] | None = None,
    batch_size: int | None = None,
    ranks: Ranks | None = None,
) -> tuple[RolloutTree, dict[int, int]]:
    """(tree, noisy steps): every example becomes a group of trees, numbered from `first_group` on.

    roots: trees of each example; by default those of the recipe
    """
    plan, grid = recipe.rollout, policy.sigmas(recipe.rollout.steps)
    noisy = noisy_steps(recipe, grid, seed, iteration)
    counts = roots or [plan.roots] * len(examples)
    members = [(first_group + i, m) for i, count in enumerate(counts) for m in range(count)]
    group = torch.tensor([g for g, _ in members])
    noise = [policy.noise(1, randomness.generator(seed, iteration, "initial noise", *m)) for m in members]
    prompt = _encode(policy, recipe, examples).repeat_interleave(torch.tensor(counts))
    bound = {
        name: getattr(plan, name).bound for name in ("kernel", "density", "noise", "solver") if getattr(plan, name)
    }
    tree = rollout(
        in_step(policy, ranks or Ranks(), len(noise), batch_size),
        torch.cat(noise),
        prompt,
        with_tail(recipe, grid, noisy),
        **bound,
        noisy=noisy,
        forks=plan.forks_at(noisy),
        apart=plan.apart,
        strides=plan.strides,
        candidates=plan.candidates,
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


def with_tail(recipe: Recipe, sigmas: Tensor, noisy: Mapping[int, int]) -> Tensor:
    """The grid of a rollout: from where the last noise lands on, as the recipe's tail says."""
    if recipe.rollout.tail is None:
        return sigmas
    return recipe.rollout.tail(sigmas=sigmas, after=max(t + length for t, length in noisy.items()))


def noisy_steps(recipe: Recipe, sigmas: Tensor, seed: int, iteration: int) -> dict[int, int]:
    """{step that draws noise at this iteration: steps that it spans}, the same on every rank.

    ValueError, which names the role, for a plan that does not fit the schedule.
    """
    plan = recipe.rollout
    if plan.noisy is None:
        return {}
    named = randomness.generator(seed, iteration, "noise plan")
    known = {"steps": plan.steps, "sigmas": sigmas, "forks": plan.forks, "iteration": iteration, "generator": named}
    try:
        return lengths(plan.noisy(**known))
    except ValueError as error:
        raise ValueError(f"rollout.noisy: {error}") from None


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
    evaluated = Watch(recipe, {})(policy, views["tree"].sigmas, on_policy=False)
    for rows in learner.micro_batches(recipe.points(**views, weight=trained)):
        q = evaluated(rows, {"elbo"}, gradient=False)
        if not is_spare(rows):
            found[rows["call"].flatten()] = q["elbo"].flatten().cpu()
    return replace(drawn, elbo_old=found.view_as(drawn.sigma))
