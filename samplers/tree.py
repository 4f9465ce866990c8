"""Branching rollouts as integer tables.

R roots, N leaves, T steps, S states, E edges (transitions), *L latent dims.
A straight rollout is the tree that never forks: R = N and no edge id repeats in a column of `edge`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from samplers import density as densities
from samplers import noise as noises
from samplers.candidates import random_one
from samplers.kernels import bind, ode, spread
from samplers.layout import depths, tree_layout


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
    depth: Int[Tensor, " E"]  # drawn edges before it
    noisy: Bool[Tensor, " E"]  # drawn, not determined
    edge_prompt: Int[Tensor, " E"]
    log_prob: Float[Tensor, " E"]  # under the policy that drew it, nats per latent dim; nan on deterministic edges
    edge: Int[Tensor, "N T"]  # id of the edge that leaf n took at step t, -1 for none
    prompt: Int[Tensor, " N"]
    root: Int[Tensor, " N"]  # which of the latents given each leaf descends from
    group: Int[Tensor, " N"]  # comparison set of each leaf
    final: Int[Tensor, " N"]  # row of `states` where it ends
    finished: Bool[Tensor, " N"]  # at sigma = 0; not a candidate that was not gone on from

    def __post_init__(self) -> None:
        """C37: ValueError where tables do not fit each other, whoever filled them."""
        steps, (low, high) = self.edge.shape[1], (int(x) for x in self.edge.aminmax())
        if len(self.sigmas) != steps + 1:
            raise ValueError(f"{len(self.sigmas)} sigmas for {steps} steps; expected {steps + 1}, both ends included.")
        if bool((self.sigmas.diff() >= 0).any()):
            raise ValueError(f"sigmas {[round(s, 4) for s in self.sigmas.tolist()]} do not fall from noise to picture.")
        last = int(torch.cat([self.source, self.target, self.final]).max())
        if last != len(self.states) - 1:
            raise ValueError(f"{len(self.states)} latents, of which edges name {last + 1}; expected every one, once.")
        if low < -1 or high != len(self.source) - 1:
            raise ValueError(f"paths name {high + 1} edges of {len(self.source)}.")

    def leaves(self) -> Float[Tensor, "M *L"]:
        """The finished latents."""
        return self.states[self.final[self.finished].to(self.states.device)]


@torch.no_grad()
def rollout(
    velocity: Callable,
    latents: Float[Tensor, "R *L"],
    prompt: Int[Tensor, " R"],
    sigmas: Float[Tensor, " T1"],
    kernel: Callable = ode,
    *,
    noisy: Mapping[int, int] | Sequence[int] = (),
    forks: Mapping[int, int] | None = None,
    apart: bool = False,
    strides: Sequence[int] = (1,),
    candidates: bool = False,
    density: Callable = densities.gaussian,
    noise: Callable = noises.independent,
    generators: Sequence[torch.Generator] = (),
    group: Int[Tensor, " R"] | None = None,
    batch_size: int | None = None,
    solver: Callable | None = None,
) -> RolloutTree:
    """Denoise `latents` along `sigmas`, forking where `forks` says; the network sees each distinct state once.

    velocity:   (latents [B, *L], sigma [B], prompt [B]) -> [B, *L]
    latents:    noise of unit variance; where a grid begins below 1 it is scaled to the level that it begins at
    kernel:     of the noisy steps, its numbers bound; what it asks of the schedule (samplers.kernels) is filled in.
                The other steps take the ODE
    noisy, forks, apart, strides: see samplers.layout.tree_layout
    candidates: of the children of a fork a random one goes on, by the generator of its root; the others end there
    density:    (next_latents, mean[, std]) -> log_prob [B]
    noise:      how siblings' noise relates (samplers.noise)
    generators: one private CPU generator per root; all noise is drawn before the first step
    group:      comparison set of each root's leaves, by default its prompt; where noisy steps stand apart, each stride
                from each of those is a set by itself: group * branches + branch (samplers.layout)
    batch_size: rows per network call, by default all
    solver:     (velocity, latents, prompt, sigmas) -> finals, in the place of Euler steps after the last noisy one
    """
    group, steps = prompt if group is None else group, len(sigmas) - 1
    latents = started(latents, sigmas)
    if noisy and len(generators) != len(latents):
        raise ValueError(f"{len(generators)} generators for {len(latents)} roots: give one per root.")
    chosen = _choose(forks, generators) if candidates else None
    ways = {"apart": apart, "strides": strides, "at_once": bool(solver and noisy), "chosen": chosen}
    layout = tree_layout(len(latents), steps, noisy, forks, **ways)
    group = group[layout.leaf_root] * layout.branches + layout.branch
    depth = depths(steps, noisy, apart=apart)
    in_batches = partial(_in_batches, velocity, batch_size)
    if solver is not None and not noisy:
        finals = solver(in_batches, latents, prompt, sigmas)
        absent = torch.full((len(layout.source),), torch.nan, device=latents.device)
        return _assemble(layout, {steps: finals}, sigmas, prompt, group, depth, absent)
    drawn = _draw(layout, noise, generators, latents)
    root, kept = torch.cat([torch.arange(len(latents)), layout.root]), layout.kept
    reached, levels, log_prob = {}, {}, []
    for t in (t for t in range(steps) if layout.frontier[t]):
        latents, ids = torch.cat([reached.pop(i) for i in layout.arrivals[t]]) if t else latents, layout.level(t)
        levels[t] = _only(latents, kept[ids])
        moves = [(i, move) for i, move in enumerate(layout.moves) if move.step == t]
        if candidates:  # those that ended here are seen by nobody
            latents, ids = latents[moves[0][1].parents], ids[moves[0][1].parents]
            moves = [(i, replace(move, parents=slice(0, len(ids)))) for i, move in moves]
        sigma = sigmas[t].to(latents.device).expand(len(latents))
        if solver is not None and moves[0][1].step_next == steps:
            reached[moves[0][0]] = latents = solver(in_batches, latents, prompt[root[ids]], sigmas[t:])
            log_prob.append(torch.full((len(latents),), torch.nan, device=latents.device))
            continue
        v = in_batches(latents, sigma, prompt[root[ids]])
        for number, move in moves:
            at, sigma_next = move.parents, sigmas[move.step_next].to(latents.device).expand(len(sigma[move.parents]))
            bound = bind(kernel, sigmas=sigmas, step=torch.tensor(t), steps=steps, depth=depth[t])
            mean, std = (bound if move.noisy else ode)(latents[at], v[at], sigma[at], sigma_next)
            mean, std = (x.repeat_interleave(move.children, 0) for x in (mean, std))
            reached[number] = mean + spread(std, mean) * drawn.pop(t) if move.noisy else mean
            log_prob.append(_call_density(density if move.noisy else _absent, reached[number], mean, std))
    levels[steps] = torch.cat([reached.pop(i) for i in layout.arrivals[steps]])
    return _assemble(layout, levels, sigmas, prompt, group, depth, torch.cat(log_prob))


def started(noise: Float[Tensor, "R *L"], sigmas: Float[Tensor, " T1"]) -> Float[Tensor, "R *L"]:
    """Noise as a state at sigmas[0]: of standard deviation hypot(1 - sigma, sigma), that of data of unit variance."""
    return noise * float(torch.hypot(1 - sigmas[0], sigmas[0]))


def _assemble(layout, levels, sigmas, prompt, group, depth, log_prob):
    """Number the kept states, level by level, and point the tables at them."""
    kept, stored = layout.kept, 0
    row = torch.full((len(kept),), -1)
    for t, states in sorted(levels.items()):
        ids = layout.level(t)
        row[ids[kept[ids]]] = stored + torch.arange(len(states))
        stored += len(states)
    return RolloutTree(
        sigmas=sigmas,
        states=torch.cat([states for _, states in sorted(levels.items())]),
        source=row[layout.source],
        target=row[layout.frontier[0] :],
        step=layout.step,
        step_next=layout.step_next,
        depth=depth[layout.step],
        noisy=layout.noisy,
        edge_prompt=prompt[layout.root],
        log_prob=log_prob,
        edge=layout.edge,
        prompt=prompt[layout.leaf_root],
        root=layout.leaf_root,
        group=group,
        final=row[layout.final],
        finished=layout.finished,
    )


def _only(latents, kept):
    """The rows that are kept, without a copy where that is all of them."""
    return latents if bool(kept.all()) else latents[kept.to(latents.device)]


def _choose(forks, generators):
    """{step: which child of each root goes on}."""
    drawn = [[random_one(torch.empty(1, n), generator=g) for n in forks.values()] for g in generators]
    return {t: torch.cat([each[i] for each in drawn]) for i, t in enumerate(forks)}


def _draw(layout, noise, generators, latents):
    """{step: noise [edges drawn there, *L]}; each root's noise comes from its own generator, in one draw."""
    roots, dims, shared = layout.frontier[0], latents.shape[1:], "shared" in inspect.signature(noise).parameters
    moves = [move for move in layout.moves if move.noisy]
    parents = [move.edges // move.children // roots for move in moves]  # of each root
    each = [move.children + (shared and move.children > 1) for move in moves]
    total = sum(p * n for p, n in zip(parents, each, strict=True))
    if not total:
        return {}
    drawn = torch.stack([torch.randn(total, *dims, generator=g) for g in generators])  # [R, total, *L]
    drawn, out, start = drawn.to(latents.device, non_blocking=True), {}, 0
    for move, count, n in zip(moves, parents, each, strict=True):
        block = drawn[:, start : start + count * n].reshape(roots * count, n, *dims)
        own, start = block[:, : move.children], start + count * n
        if move.children > 1:
            own = noise(own, block[:, move.children :]) if shared else noise(own)
        out[move.step] = own.flatten(0, 1)
    return out


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
