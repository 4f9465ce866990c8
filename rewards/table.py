"""The numbers that leave this package: one row per rollout, one column per reward."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class RewardTable:
    """What every reward said about every rollout.  Higher is better; units differ by column.  fp32, on the CPU.

    An entry that could not be scored holds 0.0, and its row is False in `valid`: read `value` through `valid`.
    """

    value: Float[Tensor, "N R"]
    weight: Float[Tensor, " R"]
    group: Int[Tensor, " N"]  # comparison set of each rollout; may span processes
    valid: Bool[Tensor, " N"]  # False: left out of its group, advantage 0
    names: tuple[str, ...]  # R names, in column order

    def total(self) -> Float[Tensor, " N"]:
        return (self.value * self.weight).sum(1)  # a matrix product rounds equal rows differently
