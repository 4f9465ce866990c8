"""From the rollouts of an iteration to its optimizer updates, in order: (group [N][, generator]) -> list of Planned.

Weights are fixed per optimizer update, on the leaves that it sees. The learning rate advances once per iteration.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from flowrl.groups import group_ids


@dataclass(frozen=True)
class Planned:
    """One optimizer update: the leaves that it sees, and where it starts from."""

    leaves: Bool[Tensor, " N"]
    kept: float = 1.0  # share of the way from the weights that drew to the present ones, gone back to before it


def once(group: Int[Tensor, " N"]) -> list[Planned]:
    """One update on all leaves: fully on-policy."""
    return [Planned(torch.ones_like(group, dtype=torch.bool))]


def minibatches(
    group: Int[Tensor, " N"],
    generator: torch.Generator,
    *,
    count: int = 2,
    epochs: int = 1,
    whole_groups: bool = False,
) -> list[Planned]:
    """`count` updates on disjoint shares of the leaves, `epochs` times over, in a fresh random order each time.

    Leaves are shuffled over all groups, so that an update sees several; whole_groups keeps each group in one update.
    Shares differ by at most one leaf (or group).
    """
    unit = group_ids(group) if whole_groups else torch.arange(len(group))
    units = int(unit.max()) + 1 if len(unit) else 0
    if not count >= 1 or not epochs >= 1:
        raise ValueError(f"minibatches of count {count} and epochs {epochs}: expected 1 or more.")
    if 0 < units < count:
        what = "groups" if whole_groups else "leaves"
        raise ValueError(f"{count} minibatches of {units} {what}: every update needs at least one.")
    planned = []
    for _ in range(epochs):
        share = torch.randperm(units, generator=generator) * count // max(units, 1)
        planned += [Planned((share == i)[unit]) for i in range(count)]
    return planned


def reposition(group: Int[Tensor, " N"], *, passes: int = 3, kept: float = 0.8) -> list[Planned]:
    """`passes` updates on all leaves, back to a share of that way, and one more update from there.  arXiv:2510.04072

    SFPO's form: theta0 + kept * (thetaK - theta0). The optimizer's moments are neither reset nor rolled back.
    """
    if passes < 1 or not 0 <= kept <= 1:
        raise ValueError(f"reposition after {passes} passes to a share of {kept}: expected 1 or more, and 0 to 1.")
    everyone = torch.ones_like(group, dtype=torch.bool)
    return [Planned(everyone)] * passes + [Planned(everyone, kept)]
