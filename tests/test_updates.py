"""flowrl/updates.py: the optimizer updates of one rollout."""

import pytest
import torch

from flowrl import updates
from flowrl.randomness import generator

GROUP = torch.tensor([3, 3, 3, 7, 7, 7, 9, 9, 9, 9])


@pytest.mark.parametrize("count", [1, 2, 3, 10])
@pytest.mark.parametrize("epochs", [1, 2])
def test_every_epoch_sees_every_leaf_once_in_shares_of_equal_size(count, epochs):
    planned = updates.minibatches(GROUP, generator(0), count=count, epochs=epochs)
    assert len(planned) == count * epochs
    for epoch in range(epochs):
        leaves = torch.stack([one.leaves for one in planned[epoch * count : (epoch + 1) * count]])
        assert bool((leaves.sum(0) == 1).all()) and leaves.sum(1).max() - leaves.sum(1).min() <= 1


def test_a_minibatch_mixes_groups_and_comes_back_after_a_resume():
    """C20."""
    one, same, other = (updates.minibatches(GROUP, generator(seed), count=2) for seed in (1, 1, 2))
    assert all(len(GROUP[share.leaves].unique()) > 1 for share in one)
    assert all(torch.equal(a.leaves, b.leaves) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0].leaves, other[0].leaves)


def test_whole_groups_stay_in_one_update():
    for share in updates.minibatches(GROUP, generator(0), count=3, whole_groups=True):
        assert len(GROUP[share.leaves].unique()) == 1 and share.leaves.sum() in (3, 4)


def test_reposition_goes_back_before_its_last_update():
    planned = updates.reposition(GROUP, passes=3, kept=0.8)
    assert [one.kept for one in planned] == [1, 1, 1, 0.8] and all(bool(one.leaves.all()) for one in planned)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: updates.minibatches(GROUP, generator(0), count=11), "11 minibatches of 10 leaves"),
        (lambda: updates.minibatches(GROUP, generator(0), count=4, whole_groups=True), "4 minibatches of 3 groups"),
        (lambda: updates.minibatches(GROUP, generator(0), count=0), "expected 1 or more"),
        (lambda: updates.reposition(GROUP, kept=1.5), "expected 1 or more, and 0 to 1"),
    ],
)
def test_updates_that_cannot_be_made_are_one_line(call, said):
    with pytest.raises(ValueError, match=said):
        call()
