"""flowrl/advantages/outcome.py: who did better than their peers."""

import pytest
import torch

from flowrl.advantages import many_rewards, outcome
from flowrl.groups import group_std
from flowrl.part import part

NORMALISERS = [
    part(outcome.grpo, scope="group"),
    part(outcome.grpo, scope="group", ddof=1, eps=1e-8),
    part(outcome.grpo, scope="batch"),
    part(outcome.grpo, scope="none"),
    part(outcome.rloo),
    part(outcome.grpo_per_noise),
    part(many_rewards.gdpo),
    part(many_rewards.per_reward),
    part(many_rewards.dvao),
    part(many_rewards.gd2po),
]
RULES = {"argvalues": NORMALISERS, "ids": [f"{p.name}-{'-'.join(map(str, p.numbers.values()))}" for p in NORMALISERS]}


def ask(rule, reward, group, weight=(1.0,)):
    group = torch.tensor(group)
    return rule(reward=torch.tensor(reward), reward_weight=torch.tensor(weight), group=group, root=group)


@pytest.mark.parametrize("rule", **RULES)
def test_a_group_of_equal_rewards_gets_exact_zeros_beside_one_that_differs(rule):
    """C01: rewards [[1, 1, 1, 1], [0, 1, 0, 1]], and values whose sum rounds."""
    ours = ask(rule, [[1.0]] * 4 + [[0.0], [1.0], [0.0], [1.0]], [0] * 4 + [1] * 4)
    assert not ours[:4].any() and ours[4:].mean() == 0 and bool((ours[4:].abs() > 0.3).all())
    ours = ask(rule, [[0.1]] * 3 + [[0.1], [0.2], [0.45]], [0] * 3 + [1] * 3)
    assert not ours[:3].any() and bool((ours[3:].abs() > 0.01).all())


@pytest.mark.parametrize("rule", **RULES)
def test_equal_rows_of_several_rewards_get_exact_zeros(rule):
    """A matrix product rounds equal rows differently by their place; with an eps of 1e-8 that earns almost 1."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        rows, columns = (int(torch.randint(2, 30, (), generator=generator)) for _ in range(2))
        reward = torch.rand(columns, generator=generator).expand(rows, columns).contiguous()
        weight, group = torch.rand(columns, generator=generator), torch.zeros(rows, dtype=torch.long)
        assert not rule(reward=reward, reward_weight=weight, group=group, root=group).any()


@pytest.mark.parametrize("rule", **RULES)
def test_a_group_of_one_gets_0(rule):
    """C03: what is left of a group when its other scores failed."""
    ours = ask(rule, [[0.7], [0.0], [1.0]], [5, 2, 2])
    assert ours[0] == 0 and bool(ours.isfinite().all())


@pytest.mark.parametrize("rule", **RULES)
def test_advantages_of_a_group_sum_to_0(rule):
    ours = ask(rule, [[0.1], [2.0], [0.4], [-3.0], [0.5]], [0, 1, 0, 1, 0])
    for value in (0, 1):
        assert ours[[i for i, g in enumerate([0, 1, 0, 1, 0]) if g == value]].sum().item() == pytest.approx(0, abs=1e-6)


def test_leave_one_out_compares_with_the_others():
    reward = torch.tensor([1.0, 2.0, 6.0, 4.0, 4.5])
    ours = outcome.rloo(reward[:, None], torch.ones(1), torch.tensor([0, 0, 0, 1, 1]))
    expected = [1 - 4, 2 - 3.5, 6 - 1.5, 4 - 4.5, 4.5 - 4]
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float32))


def test_leave_one_out_is_four_thirds_of_the_centred_reward_for_four():
    reward, group = torch.tensor([[0.1], [0.4], [0.7], [0.2]]), torch.zeros(4, dtype=torch.long)
    centred = outcome.grpo(reward, torch.ones(1), group, scope="none")
    torch.testing.assert_close(outcome.rloo(reward, torch.ones(1), group), centred * 4 / 3)


def test_leave_one_out_over_the_spread_of_a_group_is_grpo_up_to_a_factor():
    """LOOP: groups of 4 and 3, whose factors are 4/3 and 3/2."""
    reward, group = torch.tensor([0.1, 0.4, 0.7, 0.2, 3.0, 5.0, 9.0])[:, None], torch.tensor([0] * 4 + [1] * 3)
    ours = outcome.rloo(reward, torch.ones(1), group) / group_std(reward[:, 0], group, ddof=0)
    factor = torch.tensor([4 / 3] * 4 + [3 / 2] * 3)
    torch.testing.assert_close(ours, factor * outcome.grpo(reward, torch.ones(1), group, eps=0.0))


def test_a_negative_weight_turns_a_reward_around():
    ours = ask(part(outcome.grpo), [[1.0], [2.0]], [0, 0], weight=(-1.0,))
    assert ours[0] > 0 > ours[1]


def test_an_unknown_scope_is_refused_with_those_that_exist():
    with pytest.raises(ValueError, match="scope 'global': accepted are group, batch, none"):
        ask(part(outcome.grpo, scope="global"), [[1.0], [2.0]], [0, 0])


REWARD = [[0.2], [0.9], [0.9], [0.1], [0.5], [0.5], [0.3], [0.4]]
GROUPS = [0, 0, 0, 0, 1, 1, 2, 2]


def test_best_and_worst_are_one_pair_per_group_and_none_without_a_difference():
    """Of two equal winners the first."""
    assert ask(part(outcome.best_and_worst), REWARD, GROUPS).tolist() == [0, 1, 0, -1, 0, 0, -1, 1]


def test_every_rollout_as_good_as_the_best_of_its_group_is_imitated():
    assert ask(part(outcome.best_of_group), REWARD, GROUPS).tolist() == [0, 1, 1, 0, 1, 1, 0, 1]


def test_a_reward_is_its_own_weight_unless_it_is_negative():
    assert ask(part(outcome.reward_itself), REWARD, GROUPS, (2.0,)).tolist() == pytest.approx(
        [2 * r for (r,) in REWARD]
    )
    with pytest.raises(ValueError, match=r"the weighted reward -0.5 is negative.*best_of_group"):
        ask(part(outcome.reward_itself), [[1.0], [-0.5]], [0, 0])


def test_a_soft_clamp_is_the_z_score_near_0_and_its_limit_far_away():
    reward, group = [[0.0]] * 99 + [[1.0]], [0] * 100
    hard, soft = (ask(part(f, scope="batch"), reward, group) for f in (outcome.grpo, outcome.grpo_soft))
    assert hard[-1] == 5 and soft[-1].item() == pytest.approx(3, abs=0.01)  # z is 9.9
    torch.testing.assert_close(soft[:99], hard[:99], atol=1e-3, rtol=0)


def test_a_scale_multiplies_what_was_clamped():
    """AWM: +-5 becomes +-1."""
    full, fifth = (ask(part(outcome.grpo, scope="batch", scale=s), REWARD, GROUPS) for s in (1.0, 0.2))
    torch.testing.assert_close(fifth, 0.2 * full)


def test_seed_groups_are_compared_noise_by_noise():
    """TempFlow-GRPO: two noises of one prompt, two branches each; the better noise earns nothing by itself."""
    reward, root = torch.tensor([0.1, 0.3, 5.1, 5.3])[:, None], torch.tensor([0, 0, 1, 1])
    ours = outcome.grpo_per_noise(reward, torch.ones(1), root, eps=0.0)
    torch.testing.assert_close(ours, torch.tensor([-1.0, 1, -1, 1]))
