"""samplers/schedules.py: the grids and what makes one usable."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samplers import schedules


@given(steps=st.integers(1, 60), shift=st.floats(0.05, 20))
def test_a_shifted_grid_falls_from_exactly_1_to_exactly_0(steps, shift):
    sigmas = schedules.check(schedules.shifted(schedules.linear(steps), shift=shift))
    assert sigmas[0] == 1 and sigmas[-1] == 0 and len(sigmas) == steps + 1


def test_a_shift_of_1_changes_nothing_and_a_larger_one_stays_longer_in_the_noise():
    sigmas = schedules.linear(10)
    torch.testing.assert_close(schedules.shifted(sigmas, shift=1.0), sigmas)
    assert bool((schedules.shifted(sigmas, shift=3.0)[1:-1] > sigmas[1:-1]).all())


@pytest.mark.parametrize("steps", [0, -3])
def test_a_grid_without_steps_is_refused(steps):
    with pytest.raises(ValueError, match="steps must be at least 1"):
        schedules.linear(steps)


@pytest.mark.parametrize("shift", [0.0, -1.0])
def test_a_shift_that_is_not_positive_is_refused(shift):
    with pytest.raises(ValueError, match="shift must be positive"):
        schedules.shifted(schedules.linear(4), shift=shift)


@pytest.mark.parametrize(
    "values",
    [[1.0, 0.5, 0.5, 0.0], [0.0, 0.5, 1.0], [1.0, 0.5, 0.1], [1.1, 0.5, 0.0], [1.0, float("nan"), 0.0]],
    ids=["flat", "rising", "not ending at 0", "above 1", "nan"],
)
def test_a_grid_that_cannot_be_walked_down_is_refused(values):
    with pytest.raises(ValueError, match="fall strictly"):
        schedules.check(torch.tensor(values))


def test_a_grid_in_another_precision_is_refused():
    with pytest.raises(ValueError, match=r"float32, not torch\.float64"):
        schedules.check(schedules.linear(4).double())
