"""flowrl/advantages/history.py: comparing with what the run remembers."""

import pytest
import torch

from flowrl.advantages import history, outcome
from flowrl.memory import trackers
from flowrl.part import part

EVERY = [history.against_history, history.against_expected, history.cross_prompt, history.group_and_global]
ONE = torch.ones(1, dtype=torch.float64)
GROUP = torch.arange(3).repeat_interleave(5)


def scalar(value):
    return torch.tensor(value, dtype=torch.float64)


def draw(seed=0):
    return torch.randn(15, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def remembered(level=0.0):
    """A memory that expects `level` everywhere."""
    each = torch.full((15,), level, dtype=torch.float64)
    found = {"history_mean": each, "history_std": each * 0 + 0.5, "expected": each}
    return found | {"proficiency_mean": scalar(level), "proficiency_std": scalar(2.0)}


def ask(rule, reward, **memory):
    return part(rule)(reward=reward, reward_weight=ONE, group=GROUP, **memory)


@pytest.mark.parametrize("rule", EVERY, ids=lambda f: f.__name__)
def test_a_shift_that_the_memory_went_along_with_is_ignored(rule):
    ours = ask(rule, draw(), **remembered())
    torch.testing.assert_close(ask(rule, draw() + 3, **remembered(3.0)), ours, atol=1e-9, rtol=0)


@pytest.mark.parametrize("rule", EVERY, ids=lambda f: f.__name__)
@pytest.mark.parametrize("value", [0.0, 0.1, -26.3])
def test_rewards_that_the_memory_expects_earn_exactly_0(rule, value):
    """C01."""
    assert not ask(rule, torch.full((15, 1), value).double(), **remembered(torch.tensor(value).item())).any()


@pytest.mark.parametrize("rule", EVERY, ids=lambda f: f.__name__)
def test_the_order_of_rows_does_not_matter(rule):
    order = torch.randperm(15, generator=torch.Generator().manual_seed(1))
    mixed = part(rule)(reward=draw()[order], reward_weight=ONE, group=GROUP[order], **remembered())
    torch.testing.assert_close(mixed, ask(rule, draw(), **remembered())[order], atol=1e-12, rtol=0)


def test_ddpo_compares_with_the_history_of_the_prompt():
    reward, memory = draw(), remembered(0.2)
    expected = ((reward[:, 0] - 0.2) / (0.5 + 1e-6)).clamp(-5, 5)
    torch.testing.assert_close(ask(history.against_history, reward, **memory), expected)


def test_without_a_history_ddpo_is_the_z_score_of_the_batch():
    reward = draw()
    given, _ = trackers.per_prompt(reward, ONE, GROUP, {})
    ours = ask(history.against_history, reward, **given)
    torch.testing.assert_close(ours, outcome.grpo(reward, ONE, GROUP * 0, eps=1e-6), atol=1e-9, rtol=0)


def test_a_flat_group_earns_what_it_did_better_than_expected():
    """SuperFlow: all good where .2 was expected, all bad where .8 was."""
    reward, expected = torch.tensor([1.0, 1, 0, 0])[:, None].double(), torch.tensor([0.2, 0.2, 0.8, 0.8]).double()
    ours = history.against_expected(reward, ONE, expected, eps=0.0)
    torch.testing.assert_close(ours, torch.tensor([1.0, 1, -1, -1]).double())


def test_the_global_term_sums_to_1_above_and_to_minus_1_below():
    reward = draw()
    ours = ask(history.cross_prompt, reward, **remembered(0.1))
    for value in range(3):
        mine = ours[value == GROUP]
        assert mine.clamp(min=0).sum().item() == pytest.approx(1) and mine.sum().item() == pytest.approx(0, abs=1e-9)
        assert bool(((mine > 0) == (reward[value == GROUP, 0] > 0.1)).all())


@pytest.mark.parametrize("level", [-50.0, 50.0])
def test_a_group_all_on_one_side_is_centred(level):
    reward = draw()
    ours = ask(history.cross_prompt, reward, **remembered(level))
    expected = outcome.grpo(reward, ONE, GROUP, scope="none", clamp=1e9) / 2
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)


def test_adagrpo_adds_a_mild_tilt_to_the_groups_z_score():
    reward = draw()
    own = outcome.grpo(reward, ONE, GROUP, ddof=1, eps=1e-8)
    ours, tilt = (ask(rule, reward, **remembered()) for rule in (history.group_and_global, history.cross_prompt))
    torch.testing.assert_close(ours, own + tilt)
    assert tilt.abs().mean() < own.abs().mean()
