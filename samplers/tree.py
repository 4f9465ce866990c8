"""Branching rollouts as integer tables.

R roots, N leaves, T steps, S states, E edges (transitions), *L latent dims.
A straight rollout is the tree that never forks: R = N and no edge id repeats in a column of `edge`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from samplers import density as densities
from samplers import noise as noises
from samplers.kernels import bind, ode, spread


@dataclass(frozen=True)
class TreeLayout:
    """Who follows whom, known before any network call.

    Edges are numbered step by step, so edge e leads to state R + e; states of one step lie next to each other.
    """

    source: Int[Tensor, " E"]  # state an edge leaves, 0..R+E-1
    step: Int[Tensor, " E"]  # schedule index before it
    root: Int[Tensor, " E"]  # root it descends from
    edge: Int[Tensor, "N T"]  # edge that leaf n took at step t; a shared prefix shares ids
    leaf_root: Int[Tensor, " N"]
    frontier: tuple[int, ...]  # states before each step, and the leaves: T+1 counts


def tree_layout(roots: int, steps: int, forks: Mapping[int, int]) -> TreeLayout:
    """The tables of `roots` trees whose states get `forks[t]` children at step t, and one elsewhere."""
    frontier = [roots]
    for t in range(steps):
        frontier.append(frontier[-1] * forks.get(t, 1))
    leaves, first_edge, first_state = frontier[-1], 0, 0
    source, step, root, edge = [], [], [], []
    for t, (before, after) in enumerate(pairwise(frontier)):
        reached = torch.arange(after)
        source.append(first_state + reached // (after // before))
        step.append(torch.full((after,), t))
        root.append(reached // (after // roots))
        edge.append(first_edge + torch.arange(leaves) // (leaves // after))
        first_edge, first_state = first_edge + after, first_state + before
    leaf_root = torch.arange(leaves) // (leaves // roots)
    tables = (torch.cat(x) for x in (source, step, root))
    return TreeLayout(*tables, torch.stack(edge, 1), leaf_root, tuple(frontier))


@dataclass(frozen=True)
class RolloutTree:
    """Every transition of a branching rollout; each state is stored once.

    `states` holds the finals and both ends of every noisy step; other states are not kept, and `source` or `target`
    is -1 there. Integer tables are on the CPU, `states` and `log_prob` on the device of the rollout.
    """

    sigmas: Float[Tensor, " T1"]  # noise level before each step and after the last, 1 -> 0
    states: Float[Tensor, "S *L"]
    source: Int[Tensor, " E"]  # row of `states` an edge leaves
    target: Int[Tensor, " E"]  # row of `states` it reaches
    step: Int[Tensor, " E"]  # schedule index before it
    step_next: Int[Tensor, " E"]  # and after it
    edge_prompt: Int[Tensor, " E"]
    log_prob: Float[Tensor, " E"]  # under the policy that drew it, nats per latent dim; nan on deterministic edges
    edge: Int[Tensor, "N T"]  # id of the edge that leaf n took at step t, -1 for none
    prompt: Int[Tensor, " N"]
    group: Int[Tensor, " N"]  # comparison set of each leaf
    final: Int[Tensor, " N"]  # row of `states` at sigma = 0

    def leaves(self) -> Float[Tensor, "N *L"]:
        """The finished latents."""
        return self.states[self.final.to(self.states.device)]


@torch.no_grad()
def rollout(
    velocity: Callable,
    latents: Float[Tensor, "R *L"],
    prompt: Int[Tensor, " R"],
    sigmas: Float[Tensor, " T1"],
    kernel: Callable = ode,
    *,
    noisy: Sequence[int] = (),
    forks: Mapping[int, int] | None = None,
    density: Callable = densities.gaussian,
    noise: Callable = noises.independent,
    generators: Sequence[torch.Generator] = (),
    group: Int[Tensor, " R"] | None = None,
    batch_size: int | None = None,
    solver: Callable | None = None,
) -> RolloutTree:
    """Denoise `latents` along `sigmas`, forking where `forks` says; the network sees each distinct state once.

    velocity:   (latents [B, *L], sigma [B], prompt [B]) -> [B, *L]
    kernel:     of the noisy steps, its numbers bound; what it asks of the schedule (samplers.kernels) is filled in.
                The other steps take the ODE
    density:    (next_latents, mean[, std]) -> log_prob [B]
    noise:      how siblings' noise relates (samplers.noise)
    generators: one private CPU generator per root; all noise is drawn before the first step
    group:      comparison set of each root's leaves, by default its prompt
    batch_size: rows per network call, by default all
    solver:     (velocity, latents, prompt, sigmas) -> finals, in the place of Euler steps where no step is noisy
    """
    forks, group = dict(forks or {}), prompt if group is None else group
    steps, roots = len(sigmas) - 1, len(latents)
    _check(steps, noisy, forks, generators, roots)
    layout = tree_layout(roots, steps, forks)
    if solver is not None:
        assert not noisy and not forks, "a multi-step solver draws no noise and does not fork"
        finals = solver(partial(_in_batches, velocity, batch_size), latents, prompt, sigmas)
        absent = torch.full((len(layout.source),), torch.nan, device=latents.device)
        return _assemble(layout, {steps: finals}, sigmas, prompt, group, absent)
    drawn = _draw(layout, noisy, noise, generators, latents)
    kept_levels = {t for s in noisy for t in (s, s + 1)} | {steps}
    levels, log_prob = {}, []
    for t in range(steps):
        if t in kept_levels:
            levels[t] = latents
        rows = len(latents)
        sigma, sigma_next = (sigmas[i].to(latents.device).expand(rows) for i in (t, t + 1))
        here = prompt[torch.arange(rows) // (rows // roots)]
        v = _in_batches(velocity, batch_size, latents, sigma, here)
        step = bind(kernel, sigmas=sigmas, step=torch.tensor(t), steps=steps) if t in noisy else ode
        mean, std = (x.repeat_interleave(forks.get(t, 1), 0) for x in step(latents, v, sigma, sigma_next))
        latents = mean + spread(std, mean) * drawn[t] if t in noisy else mean
        density_of = density if t in noisy else _absent
        log_prob.append(_call_density(density_of, latents, mean, std))
    levels[steps] = latents
    return _assemble(layout, levels, sigmas, prompt, group, torch.cat(log_prob))


def _assemble(layout, levels, sigmas, prompt, group, log_prob):
    """Number the kept states and point the tables at them."""
    starts = torch.tensor((0, *layout.frontier)).cumsum(0)
    row = torch.full((int(starts[-1]),), -1)
    stored = 0
    for t, states in sorted(levels.items()):
        row[starts[t] : starts[t] + len(states)] = stored + torch.arange(len(states))
        stored += len(states)
    target = layout.frontier[0] + torch.arange(len(layout.source))
    return RolloutTree(
        sigmas=sigmas,
        states=torch.cat([states for _, states in sorted(levels.items())]),
        source=row[layout.source],
        target=row[target],
        step=layout.step,
        step_next=layout.step + 1,
        edge_prompt=prompt[layout.root],
        log_prob=log_prob,
        edge=layout.edge,
        prompt=prompt[layout.leaf_root],
        group=group[layout.leaf_root],
        final=row[target[layout.edge[:, -1]]],
    )


def _draw(layout, noisy, noise, generators, latents):
    """{step: noise [frontier after it, *L]}; each root's noise comes from its own generator, in one draw."""
    roots, dims, shared = layout.frontier[0], latents.shape[1:], "shared" in inspect.signature(noise).parameters
    counts = {}  # per root: states that step from here, children of each
    for t in sorted(noisy):
        parents, children = layout.frontier[t] // roots, layout.frontier[t + 1] // layout.frontier[t]
        counts[t] = parents, children
    per_parent = {t: c + (shared and c > 1) for t, (_, c) in counts.items()}
    total = sum(p * per_parent[t] for t, (p, _) in counts.items())
    if not total:
        return {}
    drawn = torch.stack([torch.randn(total, *dims, generator=g) for g in generators])  # [R, total, *L]
    drawn, out, start = drawn.to(latents.device, non_blocking=True), {}, 0
    for t, (parents, children) in counts.items():
        size = parents * per_parent[t]
        block = drawn[:, start : start + size].reshape(roots * parents, per_parent[t], *dims)
        own = block[:, :children]
        if children > 1:
            own = noise(own, block[:, children:]) if shared else noise(own)
        out[t], start = own.flatten(0, 1), start + size
    return out


def _check(steps, noisy, forks, generators, roots):
    if any(not 0 <= t < steps - 1 for t in noisy):
        raise ValueError(
            f"noisy steps {sorted(noisy)}: only steps 0..{steps - 2} of {steps} may draw noise; step {steps - 1} has "
            "zero transition noise (sigma_next = 0)."
        )
    for t, children in forks.items():
        if t not in noisy and children > 1:
            raise ValueError(
                f"a fork at step {t}, which draws no noise, makes equal children; noisy steps: {sorted(noisy)}."
            )
        if children < 1:
            raise ValueError(f"forks[{t}] = {children}: a state has at least one child.")
    if noisy and len(generators) != roots:
        raise ValueError(f"{len(generators)} generators for {roots} roots: give one per root.")


def _in_batches(velocity, size, *rows):
    if size is None or size >= len(rows[0]):
        return velocity(*rows)
    return torch.cat([velocity(*chunk) for chunk in zip(*(x.split(size) for x in rows), strict=True)])


def _absent(next_latents, mean, std):
    """A deterministic step has no density."""
    return torch.full_like(std, torch.nan)


def _call_density(density, latents, mean, std):
    takes_std = "std" in inspect.signature(density).parameters
    return density(latents, mean, std) if takes_std else density(latents, mean)
