"""Who follows whom in a rollout, as integer tables, known before any network call.

R roots, N leaves, T steps, S states, E edges (transitions). Edges are numbered step by step, in the order of the moves;
states are numbered too: the roots are 0..R-1, and edge e leads to state R + e.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class Move:
    """Edges that leave one level together: all of them drawn or all determined, all of one length."""

    step: int
    step_next: int
    noisy: bool
    parents: slice | Int[Tensor, " P"]  # of the states of the level, in the order in which they arrive
    children: int  # of each parent, consecutive

    @property
    def edges(self) -> int:
        count = self.parents.stop - self.parents.start if isinstance(self.parents, slice) else len(self.parents)
        return count * self.children


@dataclass(frozen=True)
class TreeLayout:
    """The tables of R trees, and the moves that make them."""

    moves: tuple[Move, ...]
    arrivals: tuple[tuple[int, ...], ...]  # per level 0..T the moves whose states make it up, in order; roots: none
    frontier: tuple[int, ...]  # states of each level
    source: Int[Tensor, " E"]  # state an edge leaves, 0..R+E-1
    step: Int[Tensor, " E"]  # schedule index before it
    step_next: Int[Tensor, " E"]  # and after it
    noisy: Bool[Tensor, " E"]  # drawn, not determined
    root: Int[Tensor, " E"]  # root it descends from
    edge: Int[Tensor, "N T"]  # edge that leaf n took at step t, -1 for none; a shared prefix shares ids
    leaf_root: Int[Tensor, " N"]
    branch: Int[
        Tensor, " N"
    ]  # comparison set within its root: its noisy step and stride where they stand apart; else 0
    branches: int  # how many of these a root has

    def level(self, t: int) -> Int[Tensor, " n"]:
        """The states before step t (or the leaves), in the order in which they arrive."""
        if not self.arrivals[t]:
            return torch.arange(self.frontier[0] if t == 0 else 0)
        first = [0, *accumulate(m.edges for m in self.moves)]
        return self.frontier[0] + torch.cat([torch.arange(first[i], first[i + 1]) for i in self.arrivals[t]])

    @property
    def finished(self) -> Bool[Tensor, " N"]:
        """The leaves that reach the end."""
        return self.step_next[self.edge.max(1).values] == self.edge.shape[1]

    @property
    def final(self) -> Int[Tensor, " N"]:
        """State of each leaf."""
        return self.frontier[0] + self.edge.max(1).values

    @property
    def kept(self) -> Bool[Tensor, " S"]:
        """The states that are needed after the rollout: the finals and both ends of every drawn edge."""
        roots, drawn = self.frontier[0], self.noisy.nonzero()[:, 0]
        kept = torch.zeros(roots + len(self.source), dtype=torch.bool)
        kept[torch.cat([self.source[drawn], roots + drawn, self.final])] = True
        return kept


def tree_layout(
    roots: int,
    steps: int,
    noisy: Mapping[int, int] | Sequence[int] = (),
    forks: Mapping[int, int] | None = None,
    *,
    apart: bool = False,
    strides: Sequence[int] = (1,),
    at_once: bool = False,
    chosen: Mapping[int, Int[Tensor, " R"]] | None = None,
) -> TreeLayout:
    """The tables of `roots` trees.

    noisy: steps that draw, or {step: steps that its jump spans}; the others follow the ODE
    forks: {noisy step: children of each state}, one elsewhere
    apart: every noisy step leaves the deterministic path of its root by itself, and its children follow the ODE to the
           end; else the noisy steps follow each other on every path
    strides: apart, where a jump has landed: one way to the end for each, over every stride-th level
    at_once: the way from where the last noise lands to the end is one edge, which a multi-step solver walks
    chosen: {fork: which child of each root goes on}: the others are leaves that end there, after the one that
            reaches the end
    """
    jumps, forks = lengths(noisy), dict(forks or {})
    _check(steps, jumps, forks, apart)
    _check_strides(steps, jumps, strides, apart)
    assert not (apart and at_once), "steps that stand apart do not land together"
    landing = max((t + length for t, length in jumps.items()), default=0) if at_once else steps
    if chosen is not None:
        assert not apart and not at_once and set(jumps.values()) <= {1}, "candidates are drawn step by step"
        moves, arrivals, frontier = _moves_of_candidates(roots, steps, jumps, forks, chosen)
    elif apart:
        moves, arrivals, frontier = _moves_apart(roots, steps, jumps, forks, strides)
    else:
        moves, arrivals, frontier = _moves(roots, steps, jumps, forks, landing)
    return _tables(roots, steps, moves, arrivals, frontier, (jumps, strides) if apart else None, chosen)


def lengths(noisy: Mapping[int, int] | Sequence[int]) -> dict[int, int]:
    """{step: steps that its jump spans} in order, 1 where nothing else is said."""
    return dict(sorted(noisy.items() if isinstance(noisy, Mapping) else dict.fromkeys(noisy, 1).items()))


def depths(steps: int, noisy: Mapping[int, int] | Sequence[int], *, apart: bool = False) -> Int[Tensor, " T"]:
    """Drawn edges before each step, on the way to it."""
    before = torch.zeros(steps, dtype=torch.long)
    for t in () if apart else lengths(noisy):
        before[t + 1 :] += 1
    return before


def _moves(roots, steps, jumps, forks, landing):
    """(moves, which of them arrive at each level, states of each level); from level `landing` on one edge is left."""
    moves, arrivals, frontier = [], [[] for _ in range(steps + 1)], [roots] + [0] * steps
    for t in range(steps):
        if not frontier[t]:
            continue
        length = jumps.get(t, 1) if t < landing else steps - t
        arrivals[t + length].append(len(moves))
        moves.append(Move(t, t + length, t in jumps, slice(0, frontier[t]), forks.get(t, 1)))
        frontier[t + length] += moves[-1].edges
    return tuple(moves), tuple(map(tuple, arrivals)), tuple(frontier)


def _moves_apart(roots, steps, jumps, forks, strides):
    """As _moves: the path, which ends where it was last left, the jumps off it, and a way on of each stride."""
    moves, last = [], max(jumps, default=steps)
    arrivals, frontier = [[] for _ in range(steps + 1)], [roots] + [0] * steps
    onward = []  # of each move: the strides by which one goes on from where it arrives

    def move(at, then):
        before = arrivals[at.step_next]
        before.insert(0 if then == (1,) and not at.noisy else len(before), len(moves))  # the path goes first
        moves.append(at)
        onward.append(then)
        frontier[at.step_next] += at.edges

    for t in range(steps):
        if t in jumps:
            move(Move(t, t + jumps[t], True, slice(0, roots), forks.get(t, 1)), strides)
        for stride in sorted({1, *strides}):
            walks = torch.tensor([stride in onward[i] for i in arrivals[t] for _ in range(moves[i].edges)])
            if t <= last:
                walks = torch.cat([torch.full((roots,), stride == 1 and t < last), walks[roots:]])
            if bool(walks.any()):
                move(Move(t, min(t + stride, steps), False, _rows(walks), 1), (stride,))
    return tuple(moves), tuple(map(tuple, arrivals)), tuple(frontier)


def _rows(kept):
    """Their numbers, as a slice where they follow each other."""
    rows = kept.nonzero()[:, 0]
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows


def _moves_of_candidates(roots, steps, jumps, forks, chosen):
    """One path for each root, and at every fork the children that leave it."""
    moves, frontier, alive = [], [roots], slice(0, roots)
    for t in range(steps):
        moves.append(Move(t, t + 1, t in jumps, alive, forks.get(t, 1)))
        frontier.append(moves[-1].edges)
        alive = torch.arange(roots) * forks[t] + chosen[t] if t in forks else slice(0, roots)
    return tuple(moves), ((), *((t,) for t in range(steps))), tuple(frontier)


def _tables(roots, steps, moves, arrivals, frontier, apart, chosen):
    """Follow the moves with numbers in the place of latents."""
    start = torch.arange(roots), torch.arange(roots), torch.full((roots, steps), -1)
    reached, columns, edges = [], [], 0  # (state, root, path of edges to it) of the edges of each move
    for move in moves:
        level = [reached[i] for i in arrivals[move.step]]
        found = map(torch.cat, zip(*level, strict=True)) if level else start
        source, root, path = (x[move.parents].repeat_interleave(move.children, 0) for x in found)
        own, edges = edges + torch.arange(len(source)), edges + len(source)
        path[:, move.step] = own
        reached.append((roots + own, root, path))
        facts = (torch.full((len(own),), x) for x in (move.step, move.step_next, move.noisy))
        columns.append((source, *facts, root))
    source, step, step_next, noisy, root = map(torch.cat, zip(*columns, strict=True))
    ends = [reached[i] for i in arrivals[steps]]
    for move, (state, *rest) in zip(moves, reached, strict=True):
        if chosen is not None and move.children > 1:
            left = torch.ones(roots, move.children).scatter(1, chosen[move.step][:, None], 0).flatten() > 0
            ends.append([x[left] for x in (state, *rest)])
    _, leaf_root, edge = map(torch.cat, zip(*ends, strict=True))
    branches = len(apart[0]) * len(apart[1]) if apart and apart[0] else 1
    branch = _branch(edge, noisy, step_next, *apart) if branches > 1 else leaf_root * 0
    order = (leaf_root * branches + branch).argsort(stable=True)
    tables = edge[order], leaf_root[order], branch[order]
    return TreeLayout(moves, arrivals, frontier, source, step, step_next, noisy, root, *tables, branches)


def _branch(edge, noisy, step_next, jumps, strides):
    """Number of the jump that every leaf took, and within it of the stride by which it went on."""
    jump = ((edge >= 0) & noisy[edge]).int().argmax(1)
    landed = step_next[edge.gather(1, jump[:, None])[:, 0]]
    stride = step_next[edge.gather(1, landed[:, None])[:, 0]] - landed
    which = (stride[:, None] == torch.tensor(strides)).int().argmax(1)
    return torch.searchsorted(torch.tensor(list(jumps)), jump) * len(strides) + which


def _check(steps, jumps, forks, apart):
    if wrong := [t for t in jumps if not 0 <= t < steps - 1]:
        raise ValueError(
            f"noisy steps {list(jumps)}: only steps 0..{steps - 2} of {steps} may draw noise; step {wrong[0]} of "
            f"{steps} has zero transition noise (sigma_next = 0) or does not exist."
        )
    for t, length in jumps.items():
        if length < 1 or t + length > steps - 1:
            raise ValueError(
                f"a jump from step {t} over {length} steps: it spans 1 or more, and ends at step {steps - 1} of "
                f"{steps} or before."
            )
        if inside := [s for s in jumps if t < s < t + length and not apart]:
            raise ValueError(f"step {inside[0]} draws noise, but the jump from step {t} over {length} steps skips it.")
    for t, children in forks.items():
        if children < 1:
            raise ValueError(f"forks[{t}] = {children}: a state has at least one child.")
        if t not in jumps and children > 1:
            raise ValueError(
                f"a fork at step {t}, which draws no noise, makes equal children; noisy steps: {list(jumps)}."
            )


def _check_strides(steps, jumps, strides, apart):
    if not apart and tuple(strides) != (1,):
        raise ValueError(f"strides {list(strides)}: only where noisy steps stand apart is there more than one way on.")
    if not strides or len(set(strides)) < len(strides) or min(strides) < 1:
        raise ValueError(f"strides {list(strides)}: expected one or more, all different, each 1 or more.")
    landed = max((t + length for t, length in jumps.items()), default=0)
    if max(strides) > steps - landed:
        raise ValueError(
            f"a stride of {max(strides)} from step {landed} on, where the last jump lands, is past the end: {steps} "
            f"steps leave {steps - landed}."
        )
