"""samplers/merges.py: how many steps a noisy jump spans."""

import math

import pytest
import torch

from samplers import merges, schedules

SIGMAS = schedules.shifted(torch.linspace(1, 0, 17, dtype=torch.float64), shift=3.0)


def power(length):
    """By j = T - step, which counts down to the picture."""
    return dict(zip(range(16, 0, -1), merges.noise_power(SIGMAS, length=length).tolist(), strict=False))


def test_the_power_of_a_jump_is_the_published_one():
    """T = 16, shift 3, eta .7."""
    one, two = power(1), power(2)
    assert [one[j] for j in range(15, 7, -1)] == pytest.approx(
        [8.93, 4.56, 3.11, 2.38, 1.94, 1.64, 1.42, 1.26], abs=6e-3
    )
    assert [two[j] for j in range(11, 7, -1)] == pytest.approx([4.10, 3.49, 3.04, 2.69], abs=6e-3)


def test_the_power_is_the_closed_form_of_a_shifted_grid():
    """exp(2h) ~ k^2 T j / ((T-j) (T + (k-1) j) (T + (k-1)(j-1))), but for j = T, which is guarded."""
    k, steps = 3, 16
    expected = [
        k * k * steps * j / ((steps - j) * (steps + (k - 1) * j) * (steps + (k - 1) * (j - 1)))
        for j in range(15, 0, -1)
    ]
    ours = [power(1)[j] for j in range(15, 0, -1)]
    constant = ours[0] / expected[0]
    assert ours == pytest.approx([constant * x for x in expected])


def test_entropy_grows_with_the_length_of_a_jump():
    for t in range(1, 10):
        grown = [float(merges.noise_power(SIGMAS, length=n)[t]) for n in range(1, 16 - t)]
        assert grown == sorted(grown) and len(set(grown)) == len(grown)
    variance = merges.noise_power(SIGMAS, length=3) / (2 * math.pi * math.e)
    expected = 0.49 * SIGMAS[1:-3] / (1 - SIGMAS[1:-3]) * (SIGMAS[1:-3] - SIGMAS[4:])
    torch.testing.assert_close(variance[1:], expected)


def test_the_first_half_of_sixteen_steps_is_merged_as_published():
    """Threshold 2.2: five steps stay single, the next three span two."""
    assert merges.merged(16, SIGMAS) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 2, 6: 2, 7: 2}


def test_without_a_threshold_no_step_is_merged():
    assert merges.merged(16, SIGMAS, threshold=-math.inf, within=1.0) == dict.fromkeys(range(15), 1)


@pytest.mark.parametrize("threshold", [1.0, 3.0, 6.0, 1e9])
def test_a_jump_is_the_shortest_that_is_long_enough_and_ends_short_of_the_picture(threshold):
    found = merges.merged(16, SIGMAS, threshold=threshold, within=1.0)
    for t, length in found.items():
        assert t + length <= 15 and merges.noise_power(SIGMAS, length=length)[t] >= threshold
        assert length == 1 or merges.noise_power(SIGMAS, length=length - 1)[t] < threshold
    assert bool(found) == (threshold < 1e9)
