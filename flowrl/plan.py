"""What a run will do, counted before a network is touched."""

from dataclasses import dataclass

import torch

from flowrl import randomness
from flowrl.assign import assign
from flowrl.recipe import Recipe
from flowrl.visual.trainer import noisy_steps
from flowrl.vocabulary import CURRENT, split
from samplers import tree_layout
from samplers.kernels import bind


@dataclass(frozen=True)
class Counts:
    """Rows of one update; a row is one state through the network once."""

    leaves: int
    states: int  # distinct, roots included
    states_stored: int
    edges: int
    rollout_calls: int
    train_edges: int
    train_calls: int  # before rows that happen to have advantage 0 are skipped
    forwards: int  # guided pairs and snapshots included
    backwards: int
    optimizer_steps: int


def count(recipe: Recipe, sigmas: torch.Tensor, *, prompts: int = 1, seed: int = 0, iteration: int = 0) -> Counts:
    """Grow the integer tables of the trees of some prompts and look which decisions would be trained.

    Raises ValueError for a plan that cannot work: noise at the last step, equal siblings, a step without noise.
    """
    plan = recipe.rollout
    noisy = noisy_steps(recipe, seed, iteration)
    check(recipe, noisy, sigmas)
    layout = tree_layout(prompts * plan.roots, plan.steps, plan.forks)
    found = _assigned(recipe, layout, prompts, noisy, sigmas, seed, iteration)
    trained = [_trained(recipe, layout, weight, found.advantage) for weight in found.weights]
    edges, calls = sum(e for e, _ in trained), sum(c for _, c in trained)
    rollout_calls = sum(layout.frontier[:-1])
    kept = {t for s in noisy for t in (s, s + 1)} | {plan.steps}
    drawn_by, updates = plan.drawn_by(iteration), len(found.weights)
    recorded = "elbo_old" in recipe.needs & recipe.recorded and (drawn_by != "current" or updates > 1)
    passes = _rows(plan.guidance)
    once = _trained(recipe, layout, torch.stack(found.weights).sum(0), found.advantage)[1]
    return Counts(
        leaves=prompts * plan.leaves,
        states=sum(layout.frontier),
        states_stored=sum(layout.frontier[t] for t in kept),
        edges=len(layout.source),
        rollout_calls=rollout_calls,
        train_edges=edges,
        train_calls=calls,
        forwards=passes * (rollout_calls + recorded * once) + calls * _forwards_per_call(recipe),
        backwards=passes * calls,
        optimizer_steps=updates,
    )


def _assigned(recipe, layout, prompts, noisy, sigmas, seed, iteration):
    """Which decisions count, on made-up rewards that differ."""
    leaves = len(layout.edge)
    reward = torch.linspace(1, 2, leaves // prompts)[:, None] ** 2  # positive, and nobody has exactly the mean
    return assign(
        recipe,
        reward=reward.repeat(prompts, 1),
        reward_weight=torch.ones(1),
        valid=torch.ones(leaves, dtype=torch.bool),
        group=torch.arange(prompts).repeat_interleave(leaves // prompts),
        edge=layout.edge,
        noisy=torch.zeros(layout.edge.shape).index_fill_(1, torch.tensor(noisy, dtype=torch.long), 1.0),
        sigmas=sigmas,
        steps=recipe.rollout.steps,
        iteration=iteration,
        generator=randomness.generator(seed, iteration, "select"),
        update_generator=randomness.generator(seed, iteration, "minibatches"),
    )


def _trained(recipe, layout, weight, advantage):
    """(decisions, network calls) of one optimizer update; advantages that are 0 by their rule are left out."""
    weight = torch.where(advantage == 0, 0, weight) if recipe.skips_zero_advantage else weight
    if recipe.noising is not None:
        rows = int((weight.sum(1) > 0).sum()) * recipe.noising.draws
        return rows, rows
    edges = layout.edge[weight > 0].unique()
    return len(edges), len(layout.source[edges].unique())


def _rows(guidance):
    """Rows of one network call: a guided one is two."""
    return 2 if guidance > 1 else 1


def _forwards_per_call(recipe):
    """Rows through the network for one training call: the policy and every snapshot, in each pass that asks for it."""

    def rows(needs):
        asked = {split(name)[1] for name in needs - recipe.recorded} - {CURRENT}
        guidances = [recipe.snapshots[name].guidance or recipe.rollout.guidance for name in asked]
        return sum(map(_rows, [recipe.rollout.guidance, *guidances]))

    if not recipe.couples:
        return rows(recipe.needs)
    return rows(set(recipe.objective.needs)) + rows({n for _, p in recipe.penalties for n in p.needs})


def check_all(recipe: Recipe, sigmas: torch.Tensor, *, seed: int, updates: int) -> None:
    """`check` for every update of a run: a plan that draws may fit at one iteration and not at another."""
    for noisy in {noisy_steps(recipe, seed, iteration) for iteration in range(updates)}:
        check(recipe, noisy, sigmas)


def check(recipe: Recipe, noisy: tuple[int, ...], sigmas: torch.Tensor) -> None:
    """Refuse what could only fail later: no noise, a last step that draws, equal siblings, a noisy step of std 0."""
    plan, last = recipe.rollout, recipe.rollout.steps - 1
    if recipe.noising is not None:
        _check_levels(recipe, sigmas)
    elif not noisy:
        raise ValueError("rollout.noisy names no step: without noise there is no decision to train.")
    if wrong := [t for t in noisy if not 0 <= t < last]:
        raise ValueError(
            f"rollout.noisy: step {wrong[0]} of {plan.steps} has zero transition noise (sigma_next = 0) or does not "
            f"exist; steps 0..{last - 1} may draw noise."
        )
    for t, children in plan.forks.items():
        if t not in noisy or children < 2:
            raise ValueError(
                f"rollout.forks: {{{t}: {children}}} makes no different children; fork at a noisy step {list(noisy)} "
                "into 2 or more."
            )
    zero = torch.zeros(1, 1)
    for t in noisy:
        kernel = bind(plan.kernel.bound, sigmas=sigmas, step=torch.tensor(t), steps=plan.steps)
        _, std = kernel(zero, zero, sigmas[t : t + 1], sigmas[t + 1 : t + 2])
        if not float(std) > 0:
            raise ValueError(
                f"rollout.kernel {plan.kernel.name} draws no noise at step {t} (std {float(std)}): nothing can be "
                "learned there. Raise its eta or leave the step to the ODE."
            )


def _check_levels(recipe, sigmas):
    """Draw noise levels once, so that a rule that cannot work says so now."""
    generator = randomness.generator(0, "noise levels")
    levels = recipe.noising.times(draws=recipe.noising.draws, generator=generator, sigmas=sigmas)
    if levels.shape != (recipe.noising.draws,) or not bool(((levels > 0) & (levels <= 1)).all()):
        raise ValueError(
            f"noising.times: {recipe.noising.times.name} returned {levels.tolist()}, expected {recipe.noising.draws} "
            "noise levels in (0, 1]."
        )
