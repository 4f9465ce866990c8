"""What a run will do, counted before a network is touched."""

from dataclasses import dataclass

import torch

from flowrl import randomness
from flowrl.assign import assign
from flowrl.recipe import Recipe
from flowrl.visual.trainer import noisy_steps
from samplers import tree_layout
from samplers.kernels import bind


@dataclass(frozen=True)
class Counts:
    """Rows for one prompt in one update; a row is one state through the network once."""

    leaves: int
    states: int  # distinct, roots included
    states_stored: int
    edges: int
    rollout_calls: int
    train_edges: int
    train_calls: int  # before rows of advantage 0 are skipped
    forwards: int  # guided pairs and snapshots included
    backwards: int


def count(recipe: Recipe, sigmas: torch.Tensor, *, seed: int = 0, iteration: int = 0) -> Counts:
    """Grow the integer tables of one prompt's tree and look which decisions would be trained.

    Raises ValueError for a plan that cannot work: noise at the last step, equal siblings, a step without noise.
    """
    plan = recipe.rollout
    noisy = noisy_steps(recipe, seed, iteration)
    check(recipe, noisy, sigmas)
    layout = tree_layout(plan.roots, plan.steps, plan.forks)
    drawn = torch.zeros(layout.edge.shape).index_fill_(1, torch.tensor(noisy, dtype=torch.long), 1.0)
    _, weight, _ = assign(
        recipe,
        reward=torch.linspace(-1, 1, plan.leaves)[:, None],
        reward_weight=torch.ones(1),
        valid=torch.ones(plan.leaves, dtype=torch.bool),
        group=torch.zeros(plan.leaves, dtype=torch.long),
        edge=layout.edge,
        noisy=drawn,
        sigmas=sigmas,
        steps=plan.steps,
        iteration=iteration,
        generator=randomness.generator(seed, iteration, "select"),
    )
    trained = layout.edge[weight > 0].unique()
    calls = len(layout.source[trained].unique())
    kept = {t for s in noisy for t in (s, s + 1)} | {plan.steps}
    rollout_calls, passes = sum(layout.frontier[:-1]), 2 if plan.guidance > 1 else 1
    return Counts(
        leaves=plan.leaves,
        states=sum(layout.frontier),
        states_stored=sum(layout.frontier[t] for t in kept),
        edges=len(layout.source),
        rollout_calls=rollout_calls,
        train_edges=len(trained),
        train_calls=calls,
        forwards=passes * (rollout_calls + calls * (1 + len(recipe.snapshots))),
        backwards=passes * calls,
    )


def check_all(recipe: Recipe, sigmas: torch.Tensor, *, seed: int, updates: int) -> None:
    """`check` for every update of a run: a plan that draws may fit at one iteration and not at another."""
    for noisy in {noisy_steps(recipe, seed, iteration) for iteration in range(updates)}:
        check(recipe, noisy, sigmas)


def check(recipe: Recipe, noisy: tuple[int, ...], sigmas: torch.Tensor) -> None:
    """Refuse what could only fail later: no noise, a last step that draws, equal siblings, a noisy step of std 0."""
    plan, last = recipe.rollout, recipe.rollout.steps - 1
    if not noisy:
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
