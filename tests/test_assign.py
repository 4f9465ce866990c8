"""flowrl/assign.py: from the table of an update to what each decision earns and how much it counts."""

import pytest
import torch

from flowrl import updates
from flowrl.assign import Leaves, assign, reward_shares
from flowrl.groups import group_rank
from flowrl.part import part
from flowrl.randomness import generator
from flowrl.recipes.visual.steps import flow_grpo
from flowrl.visual.table import of_kernel
from flowrl.visual.trainer import noisy_steps
from samplers import schedules, tree_layout


def table(recipe, groups=2, columns=1):
    """[reward, reward_weight, valid, group, edge, noisy, root] of `groups` prompts under the recipe's own tree."""
    plan = recipe.rollout
    noisy = noisy_steps(recipe, schedules.linear(plan.steps), 0, 0)
    forks, roots = plan.forks_at(noisy), groups * plan.roots
    chosen = {t: torch.zeros(roots, dtype=torch.long) for t in forks} if plan.candidates else None
    layout = tree_layout(roots, plan.steps, noisy, forks, apart=plan.apart, chosen=chosen)
    leaves = len(layout.edge)
    reward = torch.rand(leaves, columns, generator=torch.Generator().manual_seed(0))
    drawn = ((layout.edge >= 0) & layout.noisy[layout.edge]).float()
    group = layout.leaf_root // plan.roots * (len(noisy) if plan.apart else 1) + layout.branch
    valid = torch.ones(leaves, dtype=torch.bool)
    return [reward, torch.ones(columns), valid, group, layout.edge, drawn, layout.leaf_root]


def ask(recipe, rows):
    reward, reward_weight, valid, group, edge, noisy, root = rows
    steps = recipe.rollout.steps
    states = (reward * reward_weight).sum(1, keepdim=True) * torch.linspace(0, 1, steps + 1)
    change = 1.0 / (1 + torch.arange(steps)).expand(edge.shape)
    seen = Leaves(
        reward, group, group, root, edge, noisy, log_prob_old=-0.1 * edge.float(), change=change, state_reward=states
    )
    known = {"sigmas": schedules.linear(steps), "steps": steps, "iteration": 0} | of_kernel(
        recipe, schedules.linear(steps), noisy_steps(recipe, schedules.linear(steps), 0, 0)
    )
    recipe = recipe.but(update=part(updates.once))  # tests/test_updates.py looks at others
    generators = {"generator": generator(0, "select"), "update_generator": generator(0, "minibatches")}
    found = assign(recipe, seen, reward_weight, valid, {}, **known, **generators)
    (weight,) = found.weights
    return found.advantage, weight, found.log


def test_weights_sum_to_1_and_lie_on_noisy_steps(recipe):
    rows = table(recipe)
    advantage, weight, log = ask(recipe, rows)
    assert advantage.shape == weight.shape == rows[4].shape
    assert weight.sum().item() == pytest.approx(1, abs=1e-6)
    assert recipe.noising or not weight[rows[5] == 0].any()
    assert log["reward/invalid"] == 0 and log["group/zero_spread"] == 0


def test_a_failed_score_leaves_its_group_as_if_it_had_never_been(recipe):
    """C04: whatever number stands in its row, the others get what they would get without it, and it gets nothing."""
    rows = table(recipe)
    rows[2][[1, 5]] = False
    rows[0][[1, 5]] = 1e6
    advantage, weight, log = ask(recipe, rows)
    rows[0][[1, 5]] = -3.0
    again, same_weight, _ = ask(recipe, rows)
    assert torch.equal(advantage, again) and torch.equal(weight, same_weight)
    assert not advantage[[1, 5]].any() and not weight[[1, 5]].any() and log["reward/invalid"] == 2
    assert weight.sum().item() == pytest.approx(1, abs=1e-6)
    if recipe.advantage.name in ("grpo", "rloo") and not recipe.rollout.forks:  # not clamped softly, not absolute
        assert advantage[rows[3] == 0][:, 0].sum().item() == pytest.approx(0, abs=1e-4)


def test_a_group_with_one_score_left_earns_0(comparing):
    """C03: [0.7, invalid, invalid, ...]."""
    rows = table(comparing)
    first = rows[6] < comparing.rollout.roots  # of the first prompt
    rows[2][first] = group_rank(rows[0][first, 0], rows[3][first]) == 0
    advantage, _, log = ask(comparing, rows)
    assert not advantage[first].any() and bool(advantage.isfinite().all()) and bool(advantage[~first].any())
    assert log["group/zero_spread"] == 0.5


def test_no_score_at_all_is_finite_and_teaches_nothing(recipe):
    rows = table(recipe)
    rows[2][:] = False
    advantage, weight, log = ask(recipe, rows)
    assert not advantage.any() and not weight.any() and log["reward/invalid"] == len(weight)


def test_equal_rewards_earn_exactly_0_and_are_counted(comparing):
    """C01: also in several columns, whose weighted sum may round."""
    rows = table(comparing, columns=5)
    first = rows[6] < comparing.rollout.roots  # of the first prompt
    rows[0][first] = torch.tensor([0.1, 0.7, 0.3, 0.9, 0.2])
    rows[1] = torch.tensor([0.3, 0.6, 0.1, 0.7, 1.1])
    advantage, _, log = ask(comparing, rows)
    assert not advantage[first].any() and bool(advantage[~first].any()) and log["group/zero_spread"] == 0.5


def test_rewards_by_prompt_index_earn_nothing(comparing):
    """C50: each prompt's leaves all got the same."""
    rows = table(comparing, groups=3)
    rows[0] = rows[3][:, None] / rows[3].max()
    advantage, _, log = ask(comparing, rows)
    assert not advantage.any() and log["group/zero_spread"] == 1.0


def test_the_order_of_rollouts_does_not_matter(recipe):
    rows = table(recipe)
    if recipe.select.name in ("random_steps", "random_chunks"):  # draw row by row
        recipe = recipe.but(select=flow_grpo().select)
    order = torch.randperm(len(rows[0]), generator=torch.Generator().manual_seed(1))
    mixed = [rows[0][order], rows[1], *(column[order] for column in rows[2:])]
    for ours, shuffled in zip(ask(recipe, rows)[:2], ask(recipe, mixed)[:2], strict=True):
        torch.testing.assert_close(shuffled, ours[order], atol=1e-5, rtol=1e-5)


def test_a_function_of_ones_own_that_returns_another_shape_is_named():
    def per_rollout(advantage):
        """Forgets the steps."""
        return advantage

    recipe = flow_grpo().but(credit=part(per_rollout))
    with pytest.raises(ValueError, match=r"credit: per_rollout returned \[32\], expected \[N, T\] = \[32, 10\]"):
        ask(recipe, table(recipe))


def test_the_share_of_a_reward_is_its_weighted_variance_within_groups():
    """C11: by hand: 2 * +-1 and +-2 around their groups' means, whatever those are; signs of weights do not matter."""
    reward = torch.tensor([[1.0, 14], [3, 10], [101, 0], [103, 4]])
    group, weight = torch.tensor([0, 0, 1, 1]), torch.tensor([2.0, -1.0])
    assert reward_shares(reward, weight, group).tolist() == [0.5, 0.5]
    assert reward_shares(reward, torch.tensor([6.0, 1.0]), group).tolist() == pytest.approx([0.9, 0.1])
    assert reward_shares(torch.ones(4, 2), weight, group).tolist() == [0, 0]
