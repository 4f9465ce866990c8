"""flowrl/groups.py: statistics over the rows that share an index."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl import groups

rows = st.lists(st.tuples(st.integers(-2, 3), st.floats(-50, 50, width=32)), min_size=1, max_size=24)


def table(drawn):
    index, x = zip(*drawn, strict=True)
    return torch.tensor(x, dtype=torch.float64), torch.tensor(index)


def statistics(x, index):
    yield from (groups.group_sum(x, index), groups.group_mean(x, index), groups.group_centre(x, index))
    yield from (groups.group_std(x, index, ddof=0), groups.group_std(x, index, ddof=1), groups.group_spread(x, index))


@given(drawn=rows, seed=st.integers(0, 99))
def test_the_order_of_rows_does_not_matter(drawn, seed):
    """C07: shuffle, compute, unshuffle."""
    x, index = table(drawn)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    for whole, shuffled in zip(statistics(x, index), statistics(x[order], index[order]), strict=True):
        torch.testing.assert_close(shuffled, whole[order], atol=1e-9, rtol=1e-9)


@given(drawn=rows)
def test_each_group_gets_what_torch_says_of_it_alone(drawn):
    x, index = table(drawn)
    for value in index.unique():
        mine = x[index == value]
        alone = [mine.sum(), mine.mean(), mine - mine.mean(), mine.std(unbiased=False)]
        alone += [mine.std() if len(mine) > 1 else mine.new_zeros(()), mine.max() - mine.min()]
        for ours, expected in zip(statistics(x, index), alone, strict=True):
            torch.testing.assert_close(ours[index == value], expected.expand(len(mine)), atol=1e-6, rtol=1e-6)


@given(value=st.floats(-1e6, 1e6, width=32), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_a_group_of_equal_rows_is_exactly_centred_and_has_no_std(value, sizes):
    """Three times 0.1 do not sum to 0.3: the mean is off by rounding, the answer is not."""
    index = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    x = torch.full((len(index),), value)
    assert not groups.group_centre(x, index).any()
    assert not groups.group_std(x, index, ddof=0).any() and not groups.group_std(x, index, ddof=1).any()


@pytest.mark.parametrize("absent", [99.0, float("nan")])
def test_a_row_of_weight_0_belongs_to_no_group(absent):
    x, index, weight = torch.tensor([1.0, 3.0, absent, 5.0]), torch.tensor([0, 0, 0, 1]), torch.tensor([1.0, 1, 0, 0])
    assert groups.group_mean(x, index, weight).tolist() == [2, 2, 2, 0]
    assert groups.group_spread(x, index, weight).tolist()[:3] == [2, 2, 2]
    assert groups.group_centre(x, index, weight).tolist()[:2] == [-1, 1]
    assert groups.group_std(x, index, weight, ddof=0).tolist()[:2] == [1, 1]


@pytest.mark.parametrize("ddof", [0, 1])
def test_rows_that_share_a_weight_count_as_one(ddof):
    """An edge under three leaves appears three times and weighs 1/3 each time."""
    once, index = torch.tensor([1.0, 4.0, 6.0]), torch.zeros(3, dtype=torch.long)
    times = torch.tensor([3, 1, 2])
    repeated, zero = once.repeat_interleave(times), torch.zeros(6, dtype=torch.long)
    weight = (1 / times).repeat_interleave(times)
    expected = groups.group_std(once, index, ddof=ddof).repeat_interleave(times)
    torch.testing.assert_close(groups.group_std(repeated, zero, weight, ddof=ddof), expected)
    torch.testing.assert_close(groups.group_mean(repeated, zero, weight), torch.full((6,), 11 / 3))


def test_rows_may_have_trailing_dims():
    x, index = torch.tensor([[1.0, 10], [3, 10], [5, 0]]), torch.tensor([1, 1, 0])
    assert groups.group_centre(x, index).tolist() == [[-1, 0], [1, 0], [0, 0]]
    assert groups.group_count(index).tolist() == [2, 2, 1]


def test_no_rows_at_all_are_no_error():
    x, index = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    assert all(len(found) == 0 for found in statistics(x, index))


@given(drawn=rows)
def test_a_rank_is_the_place_in_the_sorted_group(drawn):
    x, index = table(drawn)
    ours = groups.group_rank(x, index)
    for value in index.unique():
        mine = (index == value).nonzero().flatten().tolist()
        expected = sorted(mine, key=lambda row: (-x[row], row))
        assert [ours[row] for row in expected] == list(range(len(mine)))
