"""samplers/noise_plans.py: which steps draw noise."""

import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


MOVING = [noise_plans.progressive, noise_plans.decaying, noise_plans.exp_decaying]


@pytest.mark.parametrize("plan", MOVING, ids=lambda f: f.__name__)
@given(steps=st.integers(2, 40), stride=st.integers(1, 6), width=st.integers(1, 6), iteration=st.integers(0, 3000))
def test_a_moving_window_keeps_its_width_and_never_reaches_the_last_step(plan, steps, stride, width, iteration):
    if width > steps - 1:
        with pytest.raises(ValueError, match="does not fit"):
            plan(steps, iteration, width=width, stride=stride)
        return
    for then in noise_plans.THEN:
        steps_now = plan(steps, iteration, width=width, stride=stride, then=then)
        assert steps_now == tuple(range(steps_now[0], steps_now[0] + width)) and steps_now[0] >= 0
        assert steps_now[-1] <= steps - 2


def places(plan, iterations):
    """[(start, iterations it stays)] in order."""
    found = []
    for i in range(iterations):
        start = plan(i)[0]
        if not found or found[-1][0] != start:
            found.append([start, 0])
        found[-1][1] += 1
    return [tuple(place) for place in found]


def test_a_progressive_window_is_the_published_one_and_does_not_shrink():
    """T = 25, w = 4: iterations 0-24 in 0..3, 25-49 in 1..4; 500-524, where it was published as 20..22, in 20..23."""
    plan = partial(noise_plans.progressive, 25)
    for iteration, first in ((0, 0), (24, 0), (25, 1), (49, 1), (500, 20), (524, 20), (525, 0), (549, 0), (550, 1)):
        assert plan(iteration) == tuple(range(first, first + 4))
    assert plan(10_000, then="stay") == (20, 21, 22, 23)


def test_windows_that_do_not_overlap_end_on_a_full_one():
    plan = partial(noise_plans.progressive, 20, width=4, every=10, stride=4)
    assert places(plan, 50) == [(0, 10), (4, 10), (8, 10), (12, 10), (15, 10)]


def test_a_decaying_window_stays_ten_iterations_at_first_and_one_at_last():
    stays = places(partial(noise_plans.decaying, 25), 300)[:21]
    assert [start for start, _ in stays] == list(range(21))
    assert (
        [n for _, n in stays] == [round(10 - 9 * i / 20) for i in range(21)] and stays[0][1] == 10 and stays[-1][1] == 1
    )


def test_an_exponentially_decaying_window_hurries_after_its_threshold():
    plan = partial(noise_plans.exp_decaying, 25, then="stay")
    stays = dict(places(plan, 600))
    assert [stays[i] for i in range(14)] == [25] * 14
    assert [stays[i] for i in range(14, 20)] == [math.ceil(25 * math.exp(-0.1 * n)) for n in range(1, 7)]


@pytest.mark.parametrize(
    ("plan", "numbers"),
    [
        (noise_plans.progressive, {"then": "stop"}),
        (noise_plans.progressive, {"stride": 0}),
        (noise_plans.progressive, {"every": 0}),
        (noise_plans.decaying, {"least": 0}),
    ],
)
def test_a_moving_window_that_cannot_move_is_refused(plan, numbers):
    with pytest.raises(ValueError, match=r"a moving window .* expected"):
        plan(25, 0, **numbers)


def test_a_single_step_may_be_any_but_the_last():
    drawn = {noise_plans.single(6, generator(0, i)) for i in range(80)}
    assert drawn == {(t,) for t in range(5)}
    assert {noise_plans.single(6, generator(0, i), within=0.5) for i in range(40)} == {(0,), (1,), (2,)}


def test_a_geometric_window_starts_where_its_ratio_says():
    """P(i) = (1 - r) r^i / (1 - r^7) for T = 10, w = 3: seven places, the last ends at step 8."""
    draws = [noise_plans.geometric_window(10, generator(0, i), width=3, ratio=0.5) for i in range(4000)]
    share = [sum(d[0] == start for d in draws) / len(draws) for start in range(8)]
    expected = [0.5 * 0.5**i / (1 - 0.5**7) for i in range(7)]
    assert sum(expected) == pytest.approx(1) and share[7] == 0
    assert share[:7] == pytest.approx(expected, abs=0.03)
    assert all(d == tuple(range(d[0], d[0] + 3)) for d in draws)


@pytest.mark.parametrize("ratio", [0.0, 1.2, -0.5])
def test_a_geometric_window_of_no_ratio_is_refused(ratio):
    with pytest.raises(ValueError, match="a geometric window of ratio"):
        noise_plans.geometric_window(10, generator(0), ratio=ratio)


def test_listed_steps_are_those_given():
    assert noise_plans.listed(16) == (0, 2, 4, 6) and noise_plans.listed(6, at=[3, 1]) == (1, 3)
    with pytest.raises(ValueError, match="step 5 ends at sigma_next = 0"):
        noise_plans.listed(6, at=(5,))
    for at in ((1, 1), ()):
        with pytest.raises(ValueError, match="expected one or more, all different"):
            noise_plans.listed(6, at=at)


def test_a_window_beside_forks_draws_noise_where_the_tree_splits_too():
    """BranchGRPO-Mix."""
    forks = {0: 2, 3: 2, 6: 2, 9: 2}
    assert noise_plans.window_and_forks(20, 0, forks) == (0, 1, 2, 3, 6, 9)
    assert noise_plans.window_and_forks(20, 200, forks) == (0, 3, 6, 8, 9, 10, 11)
    assert noise_plans.window_and_forks(20, 0, {5: 1}) == (0, 1, 2, 3)
