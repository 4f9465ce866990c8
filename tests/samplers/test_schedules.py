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


@pytest.mark.parametrize("shift", [1.0, 3.0, 12.0])
@pytest.mark.parametrize(("share", "left"), [(0.4, 8), (0.2, 4), (1.0, 20), (0.01, 1)])
def test_a_compressed_grid_ends_in_fewer_steps_that_are_even_before_its_shift(share, left, shift):
    """MixGRPO-Flash: 25 steps, a window 1..4, so 20 steps are left; the shift is read off the grid."""
    sigmas = schedules.shifted(schedules.linear(25), shift=shift)
    ours = schedules.check(schedules.compressed(sigmas, after=5, share=share))
    assert torch.equal(ours[:6], sigmas[:6]) and len(ours) == 6 + left and ours[-1] == 0
    even = schedules.shifted(ours[5:], shift=1 / shift)
    torch.testing.assert_close(even.diff(), (-even[0] / left).expand(left))


SD3 = [1, 0.960129, 0.913349, 0.857692, 0.790368, 0.707278, 0.602151, 0.464876, 0.278049, 0.008929, 0]  # shifted twice
FLUX = [1, 0.936863, 0.868332, 0.793687, 0.712071, 0.622459, 0.523616, 0.414038, 0.291875, 0.154828, 0]


@pytest.mark.parametrize("values", [SD3, FLUX, [1, 0.5, 0], [1, 0]])
def test_a_compressed_grid_of_all_its_steps_is_the_grid(values):
    sigmas = torch.tensor(values, dtype=torch.float32)
    for after in range(len(sigmas) - 1):
        torch.testing.assert_close(schedules.compressed(sigmas, after=after, share=1.0), sigmas)


def test_a_compressed_grid_of_half_its_steps_has_every_other_level():
    sigmas = torch.tensor(SD3)
    torch.testing.assert_close(schedules.compressed(sigmas, after=4, share=0.5)[4:], sigmas[4::2])


@pytest.mark.parametrize("share", [0.3, 0.4, 0.7, 0.9])
def test_a_compressed_grid_falls_between_the_levels_of_a_pipelines_own(share):
    for after in range(10):
        schedules.check(schedules.compressed(torch.tensor(SD3), after=after, share=share))


@pytest.mark.parametrize(("after", "share"), [(10, 0.4), (-1, 0.4), (2, 0.0), (2, 1.5)])
def test_a_grid_cannot_be_compressed_after_its_end_or_to_more_than_it_has(after, share):
    with pytest.raises(ValueError, match=r"above 0 and at most 1, and a step of 0\.\.9"):
        schedules.compressed(schedules.linear(10), after=after, share=share)
