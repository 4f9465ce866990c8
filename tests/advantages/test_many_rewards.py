"""flowrl/advantages/many_rewards.py: comparing reward by reward."""

import pytest
import torch

from flowrl.advantages import many_rewards, outcome
from flowrl.part import part

EVERY = [many_rewards.per_reward, many_rewards.gdpo, many_rewards.gd2po, many_rewards.dvao, many_rewards.standardised]
SCALE_FREE = [part(f, eps=1e-12) for f in EVERY if f is not many_rewards.dvao]
NAMES = {"ids": lambda value: getattr(value, "name", getattr(value, "__name__", str(value)))}
GROUP = torch.arange(5).repeat_interleave(6)


def draw(rewards=2, rows=30, seed=0):
    return torch.randn(rows, rewards, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_the_scale_of_a_reward_does_not_matter_to_gdpo():
    """C11: one reward in 0..1, the other in 0..25."""
    reward = torch.rand(12, 2, generator=torch.Generator().manual_seed(0))
    group, weight = torch.arange(3).repeat_interleave(4), torch.tensor([1.0, 1.0])
    ours = many_rewards.gdpo(reward, weight, group)
    torch.testing.assert_close(
        many_rewards.gdpo(reward * torch.tensor([1.0, 25.0]), weight, group), ours, atol=1e-4, rtol=0
    )
    alone = [many_rewards.gdpo(column[:, None], weight[:1], group) for column in reward.T]
    of_one, of_other = (torch.corrcoef(torch.stack([ours, one]))[0, 1] for one in alone)
    assert of_one.item() == pytest.approx(of_other.item(), abs=1e-4)


def test_gdpo_tells_apart_what_a_sum_of_rewards_cannot():
    """Pairs (0,0),(0,1) and (0,0),(1,1): the sum gives both +-1; decoupled, the second earns twice the first."""
    reward, group = torch.tensor([[0.0, 0], [0, 1], [0, 0], [1, 1]]), torch.tensor([0, 0, 1, 1])
    weight = torch.ones(2)
    summed, decoupled = outcome.grpo(reward, weight, group), many_rewards.gdpo(reward, weight, group)
    assert summed[1].item() == pytest.approx(summed[3].item(), abs=1e-3)
    assert decoupled[3].item() == pytest.approx(2 * decoupled[1].item(), rel=1e-4)


@pytest.mark.parametrize("rule", EVERY, **NAMES)
def test_one_reward_gives_grpo_up_to_the_scale_of_the_batch(rule):
    reward = draw(1)
    ours = part(rule, eps=1e-12)(reward=reward, reward_weight=double(1), group=GROUP)
    ddof = part(rule).number("ddof")
    theirs = outcome.grpo(reward, double(1), GROUP, ddof=ddof, eps=1e-12)
    whitened = theirs / theirs.std(unbiased=bool(ddof))
    expected = whitened if rule in (many_rewards.gdpo, many_rewards.gd2po) else theirs
    torch.testing.assert_close(ours, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("rule", SCALE_FREE, **NAMES)
def test_the_scale_of_a_reward_drops_out(rule):
    reward, weight = draw(), double(1, 0.5)
    ours = rule(reward=reward, reward_weight=weight, group=GROUP)
    scaled = rule(reward=reward * double(1, 25), reward_weight=weight, group=GROUP)
    torch.testing.assert_close(scaled, ours, atol=1e-6, rtol=0)


@pytest.mark.parametrize("rule", EVERY, **NAMES)
def test_a_reward_without_any_difference_changes_nothing(rule):
    reward = draw(2)
    reward[:, 1] = 0.3
    ours = rule(reward, double(1, 1), GROUP)
    torch.testing.assert_close(ours, rule(reward[:, :1], double(1), GROUP), atol=1e-9, rtol=0)


@pytest.mark.parametrize("rule", [many_rewards.gdpo, many_rewards.gd2po], ids=lambda f: f.__name__)
def test_a_whitened_advantage_has_mean_0_and_std_1_over_what_is_kept(rule):
    ours = rule(draw(3), double(1, 1, 1), GROUP)
    kept = ours[ours != 0]
    assert kept.mean().item() == pytest.approx(0, abs=1e-9) and kept.std(unbiased=False).item() == pytest.approx(
        1, abs=1e-5
    )


def test_a_reward_per_group_is_scaled_before_the_sum():
    """The hand-worked sum of two rewards, before whitening."""
    first = double(0.1, 0.3, 0.5, 0.7, 0.2, 0.2, 0.4, 0.4)
    reward = torch.stack([first, double(10, 30, 20, 40, 5, 15, 15, 25)], dim=1)
    ours = many_rewards.per_reward(reward, double(1, 0.5), torch.arange(2).repeat_interleave(4), ddof=0)
    expected = double(-2.012461, -0.223607, 0.223607, 2.012461, -1.707107, -1, 1, 1.707107)
    torch.testing.assert_close(ours, expected, atol=6e-7, rtol=0)


def test_the_decoupled_sum_tells_pairs_apart_by_two():
    """(0,0),(0,1) and (0,0),(1,1), unbiased: the summed reward +-.707 for both; decoupled +-.707 and +-1.414."""
    reward, group = double([0, 0], [0, 1], [0, 0], [1, 1]), torch.tensor([0, 0, 1, 1])
    summed = outcome.grpo(reward, double(1, 1), group, ddof=1, eps=1e-8)
    torch.testing.assert_close(summed, double(-0.707, 0.707, -0.707, 0.707), atol=5e-4, rtol=0)
    ours = many_rewards.per_reward(reward, double(1, 1), group)
    torch.testing.assert_close(ours, double(-0.707, 0.707, -1.414, 1.414), atol=5e-4, rtol=0)


def conflicts(reward):
    z = [outcome.grpo(column[:, None], double(1), GROUP, eps=1e-6, clamp=1e9) for column in reward.T]
    return (torch.stack(z) > 1e-8).any(0) & (torch.stack(z) < -1e-8).any(0)


def test_without_a_threshold_nothing_is_left_out_and_gd2po_is_gdpo():
    reward = draw(3)
    ours = many_rewards.gd2po(reward, double(1, 1, 1), GROUP, tau=0.0)
    torch.testing.assert_close(ours, many_rewards.gdpo(reward, double(1, 1, 1), GROUP), atol=1e-9, rtol=0)


@pytest.mark.parametrize("tau", [0.2, 1.5])
def test_rewards_that_agree_leave_nothing_out_and_gd2po_is_gdpo(tau):
    """Every rollout is above both means of its group or below both; the rewards rank differently above them."""
    reward, group = double([0, 0], [1, 0.1], [4, 0.9], [5, 0.6], [2, 0.5], [3, 0.8]), torch.tensor([0, 0, 0, 0, 1, 1])
    ours = many_rewards.gd2po(reward, double(1, 1), group, tau=tau)
    assert torch.equal(ours, many_rewards.gdpo(reward, double(1, 1), group)) and bool((ours != 0).all())


@pytest.mark.parametrize("tau", [1.0, 1.5])
def test_a_threshold_of_1_or_more_leaves_out_every_conflict(tau):
    reward = draw(2)
    ours = many_rewards.gd2po(reward, double(1, 1), GROUP, tau=tau)
    assert torch.equal(ours == 0, conflicts(reward)) and 5 < int((ours == 0).sum()) < 25


def test_equal_and_opposite_rewards_are_left_out_for_any_threshold():
    reward = double([1, -1], [-1, 1], [1, -1], [-1, 1])
    assert not many_rewards.gd2po(reward, double(1, 1), torch.zeros(4, dtype=torch.long), tau=1e-9).any()


def test_a_group_counts_by_the_share_of_it_that_is_kept():
    """Two groups alike but for one pair of conflicts: before whitening its kept ones are halved."""
    kept = double([2, 2], [-2, -2])
    reward = torch.cat([kept, double([0, 0], [0, 0]), kept, double([2, -2], [-2, 2])])
    group = torch.arange(2).repeat_interleave(4)
    ours = many_rewards.gd2po(reward, double(1, 1), group, tau=1.0, eps=1e-12)
    z_first, z_second = 2 / 2**0.5, 1.0  # stds of the groups: sqrt(2) and 2
    assert (ours[4] / ours[0]).item() == pytest.approx(0.5 * z_second / z_first)
    assert ours[6:].tolist() == [0, 0]


def test_a_group_of_conflicts_gives_no_gradient_and_one_of_equals_neither():
    reward = torch.cat([double([1, -1], [-1, 1]), draw(2, 4), double([3, 3], [3, 3])])
    group = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2])
    ours = many_rewards.gd2po(reward, double(1, 1), group)
    assert not ours[[0, 1, 6, 7]].any() and bool(ours[2:6].any())


def test_the_two_forms_of_dvao_agree():
    """Weighed z-scores, and the weighed centred rewards over the sum of the weighed stds."""
    reward, weight = draw(3) * double(1, 4, 0.2), double(1, 0.5, 2)
    z = torch.stack([outcome.grpo(c[:, None], double(1), GROUP, eps=0.0) for c in reward.T], 1)
    for value in range(5):
        mine = reward[value == GROUP]
        std = mine.std(0, unbiased=False)
        share = weight * std / (weight * std).sum()
        ours = many_rewards.dvao(reward, weight, GROUP, eps=0.0)[value == GROUP]
        torch.testing.assert_close(ours, (z[value == GROUP] * share).sum(1))
        closed = ((mine - mine.mean(0)) * weight).sum(1) / (weight * std).sum()
        torch.testing.assert_close(ours, closed)


def test_dvao_is_bounded_by_the_advantage_of_the_summed_reward():
    """The denominator is larger; in the mean square it lies above the average of z-scores."""
    reward, weight = draw(3) * double(1, 2, 5), double(1, 1, 1)
    ours, summed = many_rewards.dvao(reward, weight, GROUP), outcome.grpo(reward, weight, GROUP, eps=0.0)
    assert bool((ours.abs() <= summed.abs() + 1e-9).all()) and bool((ours * summed >= 0).all())
    average = many_rewards.per_reward(reward, weight / 3, GROUP, ddof=0)
    assert average.square().mean() < ours.square().mean() < summed.square().mean() == pytest.approx(1)


def test_a_larger_scale_weighs_more_in_dvao_and_a_flat_reward_nothing():
    reward = draw(2)
    towards = [many_rewards.dvao(reward * double(1, c), double(1, 1), GROUP) for c in (1, 100)]
    alone = many_rewards.dvao(reward[:, 1:], double(1), GROUP)
    near, far = ((a - alone).abs().max() for a in towards[::-1])
    assert near < 0.1 < far
    reward[:6, 0] = 7.0
    ours = many_rewards.dvao(reward, double(1, 1), GROUP)
    torch.testing.assert_close(ours[:6], alone[:6], atol=1e-6, rtol=0)
    assert not many_rewards.dvao(torch.ones(30, 2).double(), double(1, 1), GROUP).any()


def test_standardised_leaves_are_compared_after_the_sum():
    """A reward that hardly differs within a group counts little there, unlike in per_reward."""
    reward, group = draw(2), torch.arange(2).repeat_interleave(15)
    reward[:15, 1] *= 1e-3
    ours = many_rewards.standardised(reward, double(1, 1), group)[:15]
    alone = outcome.grpo(reward[:, :1], double(1), group)[:15]
    assert (ours - alone).abs().max() < 0.01
    assert (many_rewards.per_reward(reward, double(1, 1), group)[:15] - alone).abs().max() > 0.3


def test_standardised_leaves_that_are_equal_earn_exactly_0():
    """C01, in values whose sum rounds."""
    reward = torch.tensor([[0.1, 0.7]] * 3 + [[0.1, 0.2], [0.2, 0.9], [0.45, 0.3]])
    ours = many_rewards.standardised(reward, torch.tensor([0.8, 0.2]), torch.arange(2).repeat_interleave(3))
    assert not ours[:3].any() and bool(ours[3:].any())
