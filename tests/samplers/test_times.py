"""samplers/times.py: noise levels for finished pictures."""

import pytest
import torch

from samplers import schedules, times


def named(seed):
    return torch.Generator().manual_seed(seed)


SIGMAS = schedules.linear(10)


def test_uniform_levels_fill_their_range_and_a_shift_moves_them_to_noise():
    plain, shifted = (times.uniform(20_000, named(0), low=0.2, high=0.8, shift=s) for s in (1.0, 3.0))
    assert plain.min() > 0.2 and plain.max() < 0.8 and plain.mean().item() == pytest.approx(0.5, abs=0.005)
    torch.testing.assert_close(shifted, 3 * plain / (1 + 2 * plain))
    assert bool((shifted > plain).all())


def test_logit_normal_levels_are_normal_behind_the_logit():
    logits = times.logit_normal(20_000, named(1), mean=0.5, std=2.0).double().logit()
    assert logits.mean().item() == pytest.approx(0.5, abs=0.05) and logits.std().item() == pytest.approx(2, abs=0.05)


def test_discrete_levels_are_different_steps_of_the_schedule():
    for seed in range(50):
        drawn = times.discrete(4, named(seed), SIGMAS, first=0, last=6)
        assert len(drawn.unique()) == 4 and set(drawn.tolist()) <= set(SIGMAS[:6].tolist())
    assert set(times.discrete(10, named(0), SIGMAS).tolist()) == set(SIGMAS[:-1].tolist())


@pytest.mark.parametrize("draws", [1, 3, 4, 10])
def test_every_segment_of_the_schedule_is_hit_once(draws):
    """V-GRPO: strata of equal length in steps, noisiest first; over many draws every step is reached."""
    bounds, reached = [10 * j // draws for j in range(draws + 1)], set()
    for seed in range(200):
        step = [round(10 * (1 - float(x))) for x in times.stratified(draws, named(seed), SIGMAS)]
        assert all(low <= t < high for t, low, high in zip(step, bounds[:-1], bounds[1:], strict=True))
        reached |= set(step)
    assert reached == set(range(10))


def test_awm_leaves_out_the_first_step_and_the_last_tenth():
    steps = {
        round(14 * (1 - float(x)))
        for s in range(300)
        for x in times.stratified(6, named(s), schedules.linear(14), first=1, fraction=0.9)
    }
    assert steps == set(range(1, 12))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: times.discrete(7, named(0), SIGMAS, last=6), "draw at most 6"),
        (lambda: times.stratified(11, named(0), SIGMAS), "draw at most 10"),
        (lambda: times.discrete(2, named(0), SIGMAS, first=8, last=12), "the schedule has steps 0..9"),
        (lambda: times.uniform(2, named(0), low=0.8, high=0.2), "expected 0 <= low < high <= 1"),
        (lambda: times.logit_normal(2, named(0), std=0.0), "expected a positive one"),
        (lambda: times.uniform(2, named(0), shift=-1.0), "shift must be positive"),
    ],
)
def test_levels_that_cannot_be_drawn_are_one_line(call, said):
    with pytest.raises(ValueError, match=said):
        call()
