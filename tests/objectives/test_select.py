"""flowrl/objectives/select.py: which decisions are trained."""

import pytest
import torch

from flowrl.objectives import select
from flowrl.randomness import generator


def test_drawn_keeps_every_decision_that_was_drawn():
    noisy = torch.tensor([[1.0, 0, 1], [0, 0, 1]])
    assert torch.equal(select.drawn(noisy), noisy)


@pytest.mark.parametrize("steps, fraction, kept", [(15, 0.6, 9), (9, 0.6, 5), (5, 0.6, 3), (3, 0.1, 1), (4, 1.0, 4)])
def test_random_steps_keeps_the_whole_part_of_the_fraction_and_at_least_one(steps, fraction, kept):
    """int(0.6 (T - 1)) of the published runs."""
    noisy = torch.ones(40, steps + 1)
    noisy[:, -1] = 0
    mask = select.random_steps(noisy, generator(0), fraction=fraction)
    assert bool((mask.sum(1) == kept).all()) and bool((mask <= noisy).all())


def test_random_steps_draws_for_each_rollout_and_reaches_every_step():
    noisy = torch.ones(60, 6)
    mask = select.random_steps(noisy, generator(0), fraction=0.5)
    assert len(mask.unique(dim=0)) > 5 and bool((mask.sum(0) > 10).all())


def test_random_steps_is_a_function_of_its_generators_name():
    noisy = torch.ones(5, 8)
    one, other = (select.random_steps(noisy, generator(3, 1, "select")) for _ in range(2))
    assert torch.equal(one, other) and not torch.equal(one, select.random_steps(noisy, generator(3, 2, "select")))


def test_random_steps_keeps_nothing_of_a_rollout_that_drew_nothing():
    assert not select.random_steps(torch.zeros(3, 4), generator(0)).any()
