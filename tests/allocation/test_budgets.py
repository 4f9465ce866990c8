"""flowrl/allocation/budgets.py: how many rollouts a prompt gets."""

import pytest
import torch

from flowrl.allocation.budgets import by_uncertainty, uncertainty


def test_a_prompt_is_least_certain_where_half_is_expected():
    expected = torch.linspace(0.01, 0.99, 99)
    ours = uncertainty(expected)
    assert ours.argmax() == 49 and ours.max() == pytest.approx(0.5, abs=1e-5)
    torch.testing.assert_close(ours, ours.flip(0))


def test_a_less_certain_prompt_gets_a_bigger_group():
    sizes = by_uncertainty(torch.tensor([0.0, 0.1, 0.13, 0.26, 0.4, 0.5, 0.6]))
    assert sizes.tolist() == [21, 21, 22, 23, 24, 24, 24]
    assert len(by_uncertainty(torch.full((9,), 0.3)).unique()) == 1
    assert by_uncertainty(torch.tensor([0.1, 0.4]), sizes=[8]).tolist() == [8, 8]


@pytest.mark.parametrize("sizes", [(), (1, 4)])
def test_sizes_without_a_group_are_refused(sizes):
    with pytest.raises(ValueError, match="expected one or more, each of 2 or more"):
        by_uncertainty(torch.tensor([0.2]), sizes=sizes)
