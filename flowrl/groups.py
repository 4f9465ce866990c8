"""Statistics over the rows that share an index.  x [M, ...], index [M] -> [M, ...]: each row gets its group's value.

Groups may have any sizes and any order of rows. Rows may carry a `weight` [M] (an edge shared by k leaves weighs 1/k in
each of them); a row of weight 0 belongs to no group, and may be nan.
"""

import torch
from jaxtyping import Int, Num
from torch import Tensor

Rows = Num[Tensor, "M *rest"]
Index = Int[Tensor, " M"]
Weight = Num[Tensor, " M"] | None


def group_sum(x: Rows, index: Index) -> Rows:
    """Sum over the group."""
    inverse, count = _dense(index)
    return x.new_zeros(count, *x.shape[1:]).index_add_(0, inverse, x)[inverse]


def group_ids(index: Index) -> Index:
    """The groups numbered 0, 1, ... without gaps, in increasing order of their index."""
    return _dense(index)[0]


def group_count(index: Index) -> Index:
    """How many rows share each row's index."""
    return group_sum(torch.ones_like(index), index)


def group_mean(x: Rows, index: Index, weight: Weight = None) -> Rows:
    """Mean over the group; 0 where the group weighs nothing."""
    if weight is None:
        return group_sum(x, index) / _like(group_count(index), x)
    total = _like(group_sum(weight, index), x)
    return torch.where(total > 0, group_sum(_weighed(x, weight), index) / total, 0)


def group_centre(x: Rows, index: Index, weight: Weight = None) -> Rows:
    """x minus its group's mean; exactly 0 where all rows of the group are equal, whatever the mean rounds to."""
    return torch.where(group_spread(x, index, weight) > 0, x - group_mean(x, index, weight), 0)


def group_std(x: Rows, index: Index, weight: Weight = None, *, ddof: int) -> Rows:
    """Standard deviation, dividing by the group's weight minus `ddof` (0 population, 1 unbiased); 0 for a lone row."""
    weight = x.new_ones(len(x)) if weight is None else weight
    square = group_sum(_weighed(group_centre(x, index, weight) ** 2, weight), index)
    room = _like(group_sum(weight, index), x) - ddof
    return torch.where(room > 1e-6, square / room.clamp(min=1e-6), 0).sqrt()


def group_max(x: Rows, index: Index) -> Rows:
    """Largest value of the group."""
    inverse, count = _dense(index)
    empty = x.new_zeros(count, *x.shape[1:])
    return empty.scatter_reduce(0, _like(inverse, x).expand_as(x), x, "amax", include_self=False)[inverse]


def group_rank(x: Num[Tensor, " M"], index: Index) -> Index:
    """Place within the group, 0 for the largest; of equal values the first row comes first."""
    order = x.argsort(descending=True, stable=True)
    order = order[index[order].argsort(stable=True)]
    place = torch.arange(len(x), device=x.device)
    first = -group_max(-place, index[order])  # where a row's group begins in this order
    return torch.empty_like(place).scatter_(0, order, place - first)


def group_spread(x: Rows, index: Index, weight: Weight = None) -> Rows:
    """Largest minus smallest value of the group; 0 exactly when they are all equal (rows of weight 0 left out)."""
    inverse, count = _dense(index)
    kept = slice(None) if weight is None else weight > 0
    where = _like(inverse, x).expand_as(x)[kept]
    empty = x.new_zeros(count, *x.shape[1:])
    largest, smallest = (empty.scatter_reduce(0, where, x[kept], how, include_self=False) for how in ("amax", "amin"))
    return (largest - smallest)[inverse]


def group_sparsity(x: Rows, index: Index) -> Rows:
    """Hoyer's (sqrt(n) - L1 / L2) / (sqrt(n) - 1) of the n values of a group: 0 if constant, 1 if all but one are 0."""
    largest = _like(group_count(index), x).to(x).sqrt()
    one, two = group_sum(x.abs(), index), group_sum(x**2, index).sqrt()
    differs = (group_spread(x, index) > 0) & (two > 0)
    sparse = (largest - one / two.clamp(min=1e-30)) / (largest - 1).clamp(min=1e-6)
    return torch.where(differs, sparse, 0)


def _dense(index: Tensor) -> tuple[Tensor, int]:
    values, inverse = index.unique(return_inverse=True)
    return inverse, len(values)


def _weighed(x: Tensor, weight: Tensor) -> Tensor:
    """weight * x, and 0 where the weight is, whatever x."""
    weight = _like(weight, x)
    return torch.where(weight > 0, weight * x, 0)


def _like(per_row: Tensor, x: Tensor) -> Tensor:
    """Give [M] the trailing dims of x."""
    return per_row.reshape(per_row.shape + (1,) * (x.ndim - 1))
