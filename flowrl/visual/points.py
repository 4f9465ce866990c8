"""Where the policy is evaluated: (tree, advantage [N, T], weight [N, T][, drawn][, chunk]) -> Points.

B rows, K decisions per row. A function here turns the tables of an update into rows, each distinct row once.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from jaxtyping import Float, Int
from torch import Tensor

from samplers import RolloutTree
from samplers.kernels import spread


@dataclass(frozen=True)
class Column:
    """Something more that the rows on a path are told, by the edge that they are."""

    name: str
    of_edge: Float[Tensor, " E"] | Int[Tensor, " E"]  # the value, or the row of `table`
    table: Float[Tensor, "M *L"] | None = None


@dataclass(frozen=True)
class Points:
    """Rows of decisions, sorted by network call.

    columns: on the CPU: prompt [B]; call, sigma, advantage, weight and more [B, K]. A call is one state seen by the
             network for one prompt; decisions that leave the same state share it.
    tables:  latents by quantity; the column of that name holds rows of the table, so that no state is stored twice.
             Where they are x0 and noise, `latents` is their mixture at sigma.
    spare:   one more row, of weight 0 and with calls below 0: what a rank computes that has to keep step with others
    """

    columns: Mapping[str, Tensor]
    tables: Mapping[str, Float[Tensor, "S *L"]]
    spare: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(self.columns["prompt"])

    @property
    def calls(self) -> int:
        """Distinct network calls that all rows together need."""
        return len(self.columns["call"].unique())

    def where(self, kept: Tensor) -> "Points":
        """The rows where `kept` [B] is true; the weights stay as they are."""
        return replace(self, columns={name: x[kept] for name, x in self.columns.items()})

    def along(self, column: Column) -> "Points":
        """These rows, told something more."""
        rows, spare = (x | {column.name: column.of_edge[x["edge"]]} for x in (self.columns, self.spare))
        tables = self.tables if column.table is None else {**self.tables, column.name: column.table}
        return Points(rows, tables, spare)

    def split(self, size: int, agree: Callable[[int], int] = lambda count: count) -> Iterator[dict[str, Tensor]]:
        """Micro-batches of at most `size` distinct calls, but at least one row.

        Latents are looked up here, so that no row of the whole update is ever stored twice: yields the columns with
        latents [B, K, *L] in the place of rows of tables. All but `call` and `prompt` is on the first table's device.
        agree: number of micro-batches here -> how many to make; the spare row fills up
        """
        counts = _filled(self.columns["call"], size)
        missing = agree(len(counts)) - len(counts)  # ranks meet before the first call, or they would meet elsewhere
        if len(self):
            for rows in zip(*(x.split(counts) for x in self.columns.values()), strict=True):
                yield self._looked_up(dict(zip(self.columns, rows, strict=True)))
        for _ in range(missing):
            yield self._looked_up(self.spare)

    def _looked_up(self, batch):
        device = next(iter(self.tables.values())).device
        stay = {name: batch[name] for name in ("call", "prompt")}  # what the host decides by
        out = {name: x.to(device, non_blocking=True) for name, x in batch.items() if name not in stay}
        for name, table in self.tables.items():
            out[name] = table[batch[name].to(table.device)].to(device, non_blocking=True)
        if "x0" in out:
            level = spread(out["sigma"], out["x0"])
            out["latents"] = (1 - level) * out["x0"] + level * out["noise"]
        return out | stay


def _filled(call: Int[Tensor, "B K"], size: int) -> list[int]:
    """How many rows each micro-batch takes, in order: at most `size` distinct calls, or one row that needs more.

    Rows with the same first call stay together. Where these alone have more calls than `size` they begin a micro-batch
    of their own, so that the calls that are repeated do not depend on the rows before them.
    """
    counts, held = [], set()
    for _, alike in groupby(call.tolist(), key=min):
        rows = [set(row) for row in alike]
        begins = not counts or len(held) + len(set().union(*rows) - held) > size
        for row in rows:
            if begins or len(held) + len(row - held) > size:
                counts.append(0)
                held, begins = set(), False
            held |= row
            counts[-1] += 1
    return counts


def on_path(tree: RolloutTree, advantage: Float[Tensor, "N T"], weight: Float[Tensor, "N T"]) -> Points:
    """The trained transitions, one per row.

    A transition that several leaves share is one row: it gets the sum of their weights and, by these, the average of
    their advantages.
    """
    trained = weight > 0
    edge, row = tree.edge[trained].unique(return_inverse=True)
    total = weight.new_zeros(len(edge)).index_add_(0, row, weight[trained])
    gain = weight.new_zeros(len(edge)).index_add_(0, row, weight[trained] * advantage[trained])
    return _in_rows(tree, edge[:, None], (gain / total)[:, None], total[:, None])


def on_chunks(
    tree: RolloutTree,
    advantage: Float[Tensor, "N T"],
    weight: Float[Tensor, "N T"],
    chunk: Int[Tensor, " T"],
) -> Points:
    """The trained transitions of a chunk in a row; K is the longest chunk, and mask [B, K] is 0 where one is shorter.

    A chunk that several leaves share is one row, as in on_path.
    """
    inside, place = chunk >= 0, (chunk[:, None] == chunk).tril(-1).sum(1)  # how many of its chunk come before a step
    shape = len(weight), int(chunk.max()) + 1, int(place[inside].max()) + 1
    edge, share, gain = (x.new_full(shape, empty) for x, empty in ((tree.edge, -1), (weight, 0), (weight, 0)))
    at = (slice(None), chunk[inside], place[inside])
    edge[at] = torch.where(weight > 0, tree.edge, -1)[:, inside]
    share[at], gain[at] = weight[:, inside], (weight * advantage)[:, inside]
    edge, share, gain = (x.flatten(0, 1) for x in (edge, share, gain))
    some = (edge >= 0).any(1)
    edge, row = edge[some].unique(dim=0, return_inverse=True)
    share, gain = (x.new_zeros(edge.shape).index_add_(0, row, x[some]) for x in (share, gain))
    return _in_rows(tree, edge, torch.where(share > 0, gain / share, 0), share)


def _in_rows(tree, edge, advantage, weight):
    """Points of edges [B, K], -1 where a row has no more; there its last edge stands in, so that nothing new is run."""
    mask, edge = edge >= 0, torch.where(edge >= 0, edge, edge.max(1, keepdim=True).values)
    order = tree.source[edge].min(1).values.argsort(stable=True)
    columns = _transitions(tree, *(x[order] for x in (edge, advantage, weight, mask.to(weight.dtype))))
    assert bool(((columns["call"] >= 0) & (columns["next_latents"] >= 0)).all()), (
        "a trained transition was not kept by the rollout"
    )
    assert not bool(columns["log_prob_old"].isnan().any()), "a deterministic step has no log-prob to train on"
    drawn = tree.noisy.nonzero()[:1].expand(-1, edge.shape[1])
    none = torch.zeros(drawn.shape, dtype=weight.dtype)
    spare = _transitions(tree, drawn, none, none, none) | {"call": torch.full(drawn.shape, -1)}
    return Points(columns, {"latents": tree.states, "next_latents": tree.states}, spare)


def _transitions(tree, edge, advantage, weight, mask):
    """The columns of some edges, [B, K] each."""
    return {
        "prompt": tree.edge_prompt[edge[:, 0]],
        "edge": edge,
        "call": tree.source[edge],
        "latents": tree.source[edge],
        "next_latents": tree.target[edge],
        "sigma": tree.sigmas[tree.step[edge]],
        "sigma_next": tree.sigmas[tree.step_next[edge]],
        "advantage": advantage,
        "weight": weight,
        "mask": mask,
        "log_prob_old": tree.log_prob.cpu()[edge],
        "step": tree.step[edge],
        "depth": tree.depth[edge],
    }


@dataclass(frozen=True)
class Drawn:
    """The J noise levels and noises at which each of the N finished pictures is seen again."""

    sigma: Float[Tensor, "N J"]
    noise: Int[Tensor, "N J"]  # row of `noises`
    noises: Float[Tensor, "M *L"]  # on the CPU; shared within a group: M < N * J
    elbo_old: Float[Tensor, "N J"] | None = None  # of the policy that drew, where a ratio asks for it


def on_noise(
    tree: RolloutTree,
    advantage: Float[Tensor, "N T"],
    weight: Float[Tensor, "N T"],
    drawn: Drawn,
    *,
    together: bool = False,
) -> Points:
    """The finished pictures at their noise levels: a row per level, or with `together` all levels in a row (K = J).

    A picture's weight is the sum of its decisions' and is shared by its levels; its advantage is the average by weight.
    """
    total, gain = weight.sum(1), (weight * advantage).sum(1)
    leaf = (total > 0).nonzero()[:, 0]
    columns = _levels(tree, drawn, leaf, (gain / total)[leaf], total[leaf])
    draws, none = drawn.sigma.shape[1], total.new_zeros(1)
    spare = _levels(tree, drawn, torch.tensor([0]), none, none) | {"call": -1 - torch.arange(draws)[None]}
    if not together:
        columns, spare = _apart(columns, draws), {name: x[:1] for name, x in _apart(spare, draws).items()}
    return Points(columns, {"x0": tree.states, "noise": drawn.noises}, spare)


def _levels(tree, drawn, leaf, advantage, weight):
    """The columns of some leaves, a row each with all of its levels."""
    draws = drawn.sigma.shape[1]
    each = torch.arange(draws).expand(len(leaf), draws)
    columns = {
        "prompt": tree.prompt[leaf],
        "call": leaf[:, None] * draws + each,
        "x0": tree.final[leaf][:, None].expand(-1, draws),
        "noise": drawn.noise[leaf],
        "sigma": drawn.sigma[leaf],
        "advantage": advantage[:, None].expand(-1, draws),
        "weight": (weight / draws)[:, None].expand(-1, draws),
        "peers": tree.group[leaf][:, None] * draws + each,
    }
    return columns | ({} if drawn.elbo_old is None else {"elbo_old": drawn.elbo_old[leaf]})


def _apart(columns, draws):
    """A row for every level."""
    prompt = columns["prompt"].repeat_interleave(draws)
    return {name: prompt if name == "prompt" else x.reshape(-1, 1) for name, x in columns.items()}
