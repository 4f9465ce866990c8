"""What a run will do, counted before a network is touched."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from flowrl import randomness
from flowrl.assign import Leaves, assign
from flowrl.recipe import Recipe
from flowrl.visual.table import of_kernel
from flowrl.visual.trainer import noisy_steps, with_tail
from flowrl.vocabulary import CURRENT, split
from samplers import tree_layout
from samplers.kernels import bind
from samplers.layout import depths

LOOKED_AT = 200  # iterations of a run whose selection moves


@dataclass(frozen=True)
class Counts:
    """Rows of one update; a row is one state through the network once."""

    leaves: int
    scored: int  # pictures that the rewards see: the leaves, clean estimates on the way, candidates
    states: int  # distinct, roots included
    states_stored: int
    edges: int
    rollout_calls: int
    train_edges: int
    # before rows that happen to have advantage 0 are skipped; chunks that do not fit into a micro-batch together repeat
    train_calls: int  # the calls that they share
    forwards: int  # guided pairs and snapshots included
    backwards: int
    optimizer_steps: int


def count(
    recipe: Recipe,
    sigmas: torch.Tensor,
    *,
    prompts: int = 1,
    seed: int = 0,
    iteration: int = 0,
    pairs: bool = True,
) -> Counts:
    """Grow the integer tables of the trees of some prompts and look which decisions would be trained.

    pairs: guidance is a pair of rows, not an input of the network
    Raises ValueError for a plan that cannot work: noise at the last step, equal siblings, a step without noise.
    """
    plan = recipe.rollout
    noisy = noisy_steps(recipe, sigmas, seed, iteration)
    check(recipe, noisy, sigmas)
    sigmas = with_tail(recipe, sigmas, noisy)
    layout = _layout(plan, prompts * plan.roots, len(sigmas) - 1, noisy)
    found = _assigned(recipe, layout, noisy, sigmas, seed, iteration)
    _check_learning(recipe, found, noisy, iteration)
    trained = [_trained(recipe, layout, weight, found.advantage) for weight in found.weights]
    edges, calls = sum(e for e, _ in trained), sum(c for _, c in trained)
    if not calls:
        raise ValueError(f"select: {recipe.select.name} leaves no decision to train at iteration {iteration}.")
    rollout_calls = len(layout.source.unique())
    if plan.solver is not None:  # one edge of many calls
        rollout_calls += sum(m.edges * (m.step_next - m.step - 1) for m in layout.moves if not m.noisy)
    scored = int(layout.finished.sum())
    if recipe.estimate is not None:  # of every state but the finals
        estimated = int(layout.kept.sum()) - scored
        each = (recipe.estimate.number("substeps") or 1) * ("velocity" in recipe.estimate.needs)
        scored, rollout_calls = scored + estimated, rollout_calls + estimated * each
    if recipe.pilot is not None:  # a deterministic picture of every candidate
        candidates = prompts * recipe.pilot.number("candidates")
        scored, rollout_calls = scored + candidates, rollout_calls + candidates * plan.steps
    if "best_velocity" in recipe.needs:
        rollout_calls += prompts * len(noisy)
    drawn_by, updates = plan.drawn_by(iteration), len(found.weights)
    recorded = "elbo_old" in recipe.needs & recipe.recorded and (drawn_by != "current" or updates > 1)
    passes = _rows(plan.guidance, pairs)
    once = _trained(recipe, layout, torch.stack(found.weights).sum(0), found.advantage)[1]
    return Counts(
        leaves=int(layout.finished.sum()),
        scored=scored,
        states=sum(layout.frontier),
        states_stored=int(layout.kept.sum()),
        edges=len(layout.source),
        rollout_calls=rollout_calls,
        train_edges=edges,
        train_calls=calls,
        forwards=passes * (rollout_calls + recorded * once) + calls * _forwards_per_call(recipe, pairs),
        backwards=passes * calls,
        optimizer_steps=updates,
    )


def _layout(plan, roots, steps, noisy):
    """The trees of a rollout."""
    forks, at_once = plan.forks_at(noisy), bool(plan.solver and noisy)
    chosen = {t: torch.zeros(roots, dtype=torch.long) for t in forks} if plan.candidates else None
    ways = {"apart": plan.apart, "strides": plan.strides, "at_once": at_once, "chosen": chosen}
    return tree_layout(roots, steps, noisy, forks, **ways)


def _assigned(recipe, layout, noisy, sigmas, seed, iteration):
    """Which decisions count, on made-up rewards that differ."""
    plan, edge = recipe.rollout, layout.edge
    prompt = layout.leaf_root // plan.roots
    place = torch.arange(len(edge)) % int(prompt.bincount().max())  # within its prompt
    reward = torch.linspace(0.5, 1, int(place.max()) + 1)[place][:, None] ** 2  # positive, and nobody has the mean
    steps = edge.shape[1]
    change = torch.where(edge >= 0, 1.0 / (1 + torch.arange(steps)), 0)
    leaves = Leaves(
        reward=reward,
        group=prompt * layout.branches + layout.branch,
        prompt=prompt,
        root=layout.leaf_root,
        edge=edge,
        noisy=((edge >= 0) & layout.noisy[edge]).float(),
        log_prob_old=torch.zeros(edge.shape),
        change=change,
        state_reward=reward * torch.linspace(0, 1, steps + 1) ** 2,
    )
    return assign(
        recipe,
        leaves,
        torch.ones(1),
        torch.ones(len(edge), dtype=torch.bool),
        {},
        sigmas=sigmas,
        **of_kernel(recipe, sigmas, noisy),
        steps=steps,
        iteration=iteration,
        generator=randomness.generator(seed, iteration, "select"),
        update_generator=randomness.generator(seed, iteration, "minibatches"),
    )


def _check_learning(recipe, found, noisy, iteration):
    """Refuse advantages that can only be 0, and fixed chunks that draw no noise."""
    trained = torch.stack(found.weights).sum(0) > 0
    if trained.any() and not found.advantage[trained].any():
        plan = recipe.rollout
        raise ValueError(
            f"advantage = {recipe.advantage.name}: 0 for every decision that is trained, though rewards differ. With "
            f"rollout.roots = {plan.roots} and rollout.forks = {plan.forks_at(noisy)} it compares groups of one member."
        )
    chunk = found.chunk
    if chunk is None or "change" in recipe.chunks.needs:
        return
    for number in chunk[chunk >= 0].unique().tolist():
        steps = (chunk == number).nonzero()[:, 0].tolist()
        if not set(steps) & noisy.keys():
            raise ValueError(
                f"chunks: steps {steps[0]} to {steps[-1]} are a chunk of which none draws noise at iteration "
                f"{iteration}, so that leaves that draw it would train nothing. Set rollout.noisy = all_but_last."
            )


def _trained(recipe, layout, weight, advantage):
    """(decisions, network calls) of one optimizer update; advantages that are 0 by their rule are left out."""
    weight = torch.where(advantage == 0, 0, weight) if recipe.skips_zero_advantage else weight
    if recipe.noising is not None:
        rows = int((weight.sum(1) > 0).sum()) * recipe.noising.draws
        return rows, rows
    edges = layout.edge[weight > 0].unique()
    return len(edges), len(layout.source[edges].unique())


def _rows(guidance, pairs):
    """Rows of one network call: a guided one is two."""
    return 2 if guidance > 1 and pairs else 1


def _forwards_per_call(recipe, pairs):
    """Rows through the network for one training call: the policy and every snapshot, in each pass that asks for it."""

    def rows(needs):
        asked = {split(name)[1] for name in needs - recipe.recorded} - {CURRENT}
        guidances = [recipe.snapshots[name].guidance or recipe.rollout.guidance for name in asked]
        return sum(_rows(guidance, pairs) for guidance in [recipe.rollout.guidance, *guidances])

    if not recipe.couples:
        return rows(recipe.needs)
    return rows(set(recipe.objective.needs)) + rows({n for _, p in recipe.penalties for n in p.needs})


def check_all(recipe: Recipe, sigmas: torch.Tensor, *, seed: int, updates: int) -> None:
    """`check` for every update of a run: a plan that draws may fit at one iteration and not at another."""
    plans = {tuple(noisy_steps(recipe, sigmas, seed, iteration).items()) for iteration in range(updates)}
    for noisy in plans:
        check(recipe, dict(noisy), sigmas)
    if "iteration" in recipe.select.needs:  # LOOKED_AT of them are looked at, each some milliseconds, and the last
        for iteration in (*range(0, updates, -(-updates // LOOKED_AT)), updates - 1):
            count(recipe, sigmas, seed=seed, iteration=iteration)


def check(recipe: Recipe, noisy: Mapping[int, int], sigmas: torch.Tensor) -> None:
    """Refuse what could only fail later: no noise, a last step that draws, equal siblings, a noisy step of std 0."""
    plan, forks = recipe.rollout, recipe.rollout.forks_at(noisy)
    if recipe.noising is not None:
        _check_levels(recipe, sigmas)
    elif not noisy:
        raise ValueError("rollout.noisy names no step: without noise there is no decision to train.")
    for t, children in forks.items():
        if t not in noisy or children < 2:
            raise ValueError(
                f"rollout.forks: {{{t}: {children}}} makes no different children; fork at a noisy step {list(noisy)} "
                "into 2 or more."
            )
    check_allocation(recipe)
    for role, tree in (("noisy", replace(plan, strides=(1,))), ("strides", plan)):
        try:
            _layout(tree, 1, plan.steps, noisy)
        except ValueError as error:
            raise ValueError(f"rollout.{role}: {error}") from None
    if recipe.estimate is not None and len(noisy) < plan.steps - 1:
        raise ValueError(
            f"estimate: {len(noisy)} of {plan.steps} steps draw noise, and states are kept around those alone. Set "
            "rollout.noisy = all_but_last."
        )
    if plan.leaves(noisy) < 2 and not plan.candidates:
        raise ValueError(f"rollout.roots = {plan.roots} and rollout.forks = {dict(forks)} make groups of one.")
    for t, length in noisy.items():
        known = {"step": torch.tensor(t), "depth": depths(plan.steps, noisy, apart=plan.apart)[t]}
        kernel = bind(plan.kernel.bound, sigmas=sigmas, steps=plan.steps, **known)
        at = sigmas[t : t + 1], sigmas[t + length : t + length + 1]
        try:
            _, std = kernel(torch.zeros(1, 1), torch.zeros(1, 1), *at)
        except ValueError as error:
            raise ValueError(f"rollout.kernel: {error}") from None
        if not float(std) > 0:
            raise ValueError(
                f"rollout.kernel {plan.kernel.name} draws no noise at step {t} (std {float(std)}): nothing can be "
                "learned there. Raise its eta or leave the step to the ODE."
            )


def check_allocation(recipe: Recipe, prompts: int = 1, per_update: int = 1) -> None:
    """Allocate once, from an empty memory: groups of one and too few prompts are refused before anything is loaded."""
    if recipe.allocate is None:
        return
    known = {"count": prompts, "per_update": per_update, "roots": recipe.rollout.roots, "memory": {}}
    try:
        recipe.allocate(**known, generator=randomness.generator(0, "allocation"))
    except ValueError as error:
        given = f"budget.prompts_per_update = {per_update} of {prompts} prompts: " if per_update > prompts else ""
        raise ValueError(f"{given}allocate = {recipe.allocate.name}: {error}") from None


def _check_levels(recipe, sigmas):
    """Draw noise levels once, so that a rule that cannot work says so now."""
    generator = randomness.generator(0, "noise levels")
    levels = recipe.noising.times(draws=recipe.noising.draws, generator=generator, sigmas=sigmas)
    if levels.shape != (recipe.noising.draws,) or not bool(((levels > 0) & (levels <= 1)).all()):
        raise ValueError(
            f"noising.times: {recipe.noising.times.name} returned {levels.tolist()}, expected {recipe.noising.draws} "
            "noise levels in (0, 1]."
        )
