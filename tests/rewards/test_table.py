"""The record that a scored batch becomes."""

import dataclasses

import pytest
import torch

from rewards.table import RewardTable


def _table():
    return RewardTable(
        value=torch.tensor([[1.0, 10.0], [2.0, 20.0]]),
        weight=torch.tensor([1.0, -0.5]),
        group=torch.tensor([0, 0]),
        valid=torch.tensor([True, True]),
        names=("sharp", "large"),
    )


def test_total_is_the_weighted_sum_of_the_columns():
    assert _table().total().tolist() == [-4.0, -8.0]


def test_a_table_cannot_be_written_to():
    with pytest.raises(dataclasses.FrozenInstanceError):
        _table().value = torch.zeros(2, 2)
