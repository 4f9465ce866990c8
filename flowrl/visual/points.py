"""Where the policy is evaluated: (tree, advantage [N, T], weight [N, T][, drawn]) -> Points.

B rows, K decisions per row. A function here turns the tables of an update into rows, each distinct row once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from samplers import RolloutTree
from samplers.kernels import spread


@dataclass(frozen=True)
class Points:
    """Rows of decisions, sorted by network call.

    columns: on the CPU: prompt [B]; call, sigma, advantage, weight and more [B, K]. A call is one state seen by the
             network for one prompt; decisions that leave the same state share it.
    tables:  latents by quantity; the column of that name holds rows of the table, so that no state is stored twice.
             Where they are x0 and noise, `latents` is their mixture at sigma.
    """

    columns: Mapping[str, Tensor]
    tables: Mapping[str, Float[Tensor, "S *L"]]

    def __len__(self) -> int:
        return len(self.columns["prompt"])

    @property
    def calls(self) -> int:
        """Distinct network calls that all rows together need."""
        return len(self.columns["call"].unique())

    def where(self, kept: Tensor) -> "Points":
        """The rows where `kept` [B] is true; the weights stay as they are."""
        return replace(self, columns={name: x[kept] for name, x in self.columns.items()})

    def split(self, size: int) -> Iterator[dict[str, Tensor]]:
        """Micro-batches of at most `size` calls, but at least one row; the decisions of one call stay together.

        Latents are looked up here, so that no row of the whole update is ever stored twice: yields the columns with
        latents [B, K, *L] in the place of rows of tables. All but `call` is on the device of the first table.
        """
        if not len(self):
            return
        call = self.columns["call"]
        _, number = call[:, 0].unique(return_inverse=True)
        _, counts = (number // max(size // call.shape[1], 1)).unique_consecutive(return_counts=True)
        device = next(iter(self.tables.values())).device
        for rows in zip(*(x.split(counts.tolist()) for x in self.columns.values()), strict=True):
            batch = dict(zip(self.columns, rows, strict=True))
            out = {name: x.to(device, non_blocking=True) for name, x in batch.items() if name != "call"}
            for name, table in self.tables.items():
                out[name] = table[batch[name].to(table.device)].to(device, non_blocking=True)
            if "x0" in out:
                level = spread(out["sigma"], out["x0"])
                out["latents"] = (1 - level) * out["x0"] + level * out["noise"]
            yield out | {"call": batch["call"]}


def on_path(tree: RolloutTree, advantage: Float[Tensor, "N T"], weight: Float[Tensor, "N T"]) -> Points:
    """The trained transitions, one per row.

    A transition that several leaves share is one row: it gets the sum of their weights and, by these, the average of
    their advantages.
    """
    trained = weight > 0
    edge, row = tree.edge[trained].unique(return_inverse=True)
    total = weight.new_zeros(len(edge)).index_add_(0, row, weight[trained])
    gain = weight.new_zeros(len(edge)).index_add_(0, row, weight[trained] * advantage[trained])
    source, target, log_prob = tree.source[edge], tree.target[edge], tree.log_prob.cpu()[edge]
    assert bool(((source >= 0) & (target >= 0)).all()), "a trained transition was not kept by the rollout"
    assert not bool(log_prob.isnan().any()), "a deterministic step has no log-prob to train on"
    order = source.argsort(stable=True)
    columns = {
        "call": source,
        "latents": source,
        "next_latents": target,
        "sigma": tree.sigmas[tree.step[edge]],
        "sigma_next": tree.sigmas[tree.step_next[edge]],
        "advantage": gain / total,
        "weight": total,
        "log_prob_old": log_prob,
        "step": tree.step[edge],
    }
    columns = {name: x[order][:, None] for name, x in columns.items()}
    tables = {"latents": tree.states, "next_latents": tree.states}
    return Points({"prompt": tree.edge_prompt[edge][order]} | columns, tables)


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
    draws = drawn.sigma.shape[1]
    each = torch.arange(draws).expand(len(leaf), draws)
    columns = {
        "call": leaf[:, None] * draws + each,
        "x0": tree.final[leaf][:, None].expand(-1, draws),
        "noise": drawn.noise[leaf],
        "sigma": drawn.sigma[leaf],
        "advantage": (gain / total)[leaf][:, None].expand(-1, draws),
        "weight": (total / draws)[leaf][:, None].expand(-1, draws),
        "peers": tree.group[leaf][:, None] * draws + each,
    }
    if drawn.elbo_old is not None:
        columns["elbo_old"] = drawn.elbo_old[leaf]
    prompt = tree.prompt[leaf]
    if not together:
        columns = {name: x.reshape(-1, 1) for name, x in columns.items()}
        prompt = prompt.repeat_interleave(draws)
    return Points({"prompt": prompt} | columns, {"x0": tree.states, "noise": drawn.noises})
