"""Where the policy is evaluated: (tree, advantage [N, T], weight [N, T]) -> Points.

B rows, K decisions per row. A function here turns the tables of an update into rows, each distinct row once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from samplers import RolloutTree


@dataclass(frozen=True)
class Points:
    """Rows of decisions, sorted by network call, beside the table of states that they refer to.

    columns: on the CPU: prompt [B]; call, source, target, sigma, sigma_next, advantage, weight, log_prob_old [B, K].
    A call is one state seen by the network for one prompt; decisions that leave the same state share it.
    """

    columns: Mapping[str, Tensor]
    states: Float[Tensor, "S *L"]

    def __len__(self) -> int:
        return len(self.columns["prompt"])

    @property
    def calls(self) -> int:
        """Distinct network calls that all rows together need."""
        return len(self.columns["call"].unique())

    def where(self, kept: Tensor) -> "Points":
        """The rows where `kept` [B] is true; the weights stay as they are."""
        return Points({name: x[kept] for name, x in self.columns.items()}, self.states)

    def split(self, size: int) -> Iterator[dict[str, Tensor]]:
        """Micro-batches of at most `size` calls; the decisions of one call stay together (K = 1).

        Latents are looked up here, so that no row of the whole update is ever stored twice: yields the columns plus
        `latents` and `next_latents` [B, K, *L]. Everything but `call` is on the device of the states.
        """
        if not len(self):
            return
        _, number = self.columns["call"][:, 0].unique(return_inverse=True)
        _, counts = (number // size).unique_consecutive(return_counts=True)
        device = self.states.device
        for rows in zip(*(x.split(counts.tolist()) for x in self.columns.values()), strict=True):
            batch = dict(zip(self.columns, rows, strict=True))
            moved = {name: x.to(device, non_blocking=True) for name, x in batch.items() if name != "call"}
            latents, next_latents = (self.states[moved.pop(end)] for end in ("source", "target"))
            yield moved | {"call": batch["call"], "latents": latents, "next_latents": next_latents}


def on_path(tree: RolloutTree, advantage: Float[Tensor, "N T"], weight: Float[Tensor, "N T"]) -> Points:
    """The trained transitions, one per row.

    A transition that several leaves share is one row: it gets the sum of their weights and, by these, the average of
    their advantages.
    """
    trained = weight > 0
    edge, row = tree.edge[trained].unique(return_inverse=True)
    total = weight.new_zeros(len(edge)).index_add_(0, row, weight[trained])
    gain = weight.new_zeros(len(edge)).index_add_(0, row, weight[trained] * advantage[trained])
    source, target = tree.source[edge], tree.target[edge]
    assert bool(((source >= 0) & (target >= 0)).all()), "a trained transition was not kept by the rollout"
    order = source.argsort(stable=True)
    columns = {
        "call": source,
        "source": source,
        "target": target,
        "sigma": tree.sigmas[tree.step[edge]],
        "sigma_next": tree.sigmas[tree.step_next[edge]],
        "advantage": gain / total,
        "weight": total,
        "log_prob_old": tree.log_prob.cpu()[edge],
        "step": tree.step[edge],
    }
    columns = {name: x[order][:, None] for name, x in columns.items()}
    return Points({"prompt": tree.edge_prompt[edge][order]} | columns, tree.states)
