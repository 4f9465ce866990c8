"""samplers/noise_plans.py: which steps draw noise."""

import pytest

from flowrl.randomness import generator
from samplers import noise_plans


def test_all_but_the_last_step_draw_noise():
    assert noise_plans.all_but_last(5) == (0, 1, 2, 3)


def test_a_window_is_consecutive_and_stays_before_the_last_step():
    assert noise_plans.window(10, start=2, width=4) == (2, 3, 4, 5)
    assert noise_plans.window(10, start=5, width=4) == (5, 6, 7, 8)


@pytest.mark.parametrize("start, width", [(6, 4), (-1, 2), (0, 0), (9, 1)])
def test_a_window_that_does_not_fit_is_refused(start, width):
    """C26: the message says why the last step cannot be in it."""
    with pytest.raises(ValueError, match="step 9 ends at sigma_next = 0"):
        noise_plans.window(10, start=start, width=width)


def test_a_random_window_takes_every_place_in_the_first_half_and_no_other():
    starts = {noise_plans.random_window(10, generator(0, i, "noise plan"), width=3, within=0.5) for i in range(60)}
    assert starts == {(0, 1, 2), (1, 2, 3), (2, 3, 4)}


def test_a_random_window_is_a_function_of_its_generators_name():
    """C41: the same on every rank and after a resume."""
    draws = [noise_plans.random_window(20, generator(7, 3, "noise plan"), width=2) for _ in range(2)]
    assert draws[0] == draws[1]


def test_a_random_window_never_reaches_the_last_step():
    for i in range(40):
        assert max(noise_plans.random_window(4, generator(0, i), width=1, within=1.0)) < 3


def test_a_random_window_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"a window of 3 steps does not fit into the first 0.5 of 4 steps"):
        noise_plans.random_window(4, generator(0), width=3, within=0.5)
