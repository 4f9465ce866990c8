"""flowrl/visual/table.py: from scored leaves to what they earned, over all ranks."""

import pytest
import torch

from flowrl.objectives import select
from flowrl.part import part
from flowrl.recipes import find
from flowrl.visual.ranks import Ranks
from flowrl.visual.table import earned, of_kernel
from flowrl.visual.trainer import noisy_steps, roll_out
from rewards.table import RewardTable
from samplers import schedules


def seen_by(toy, loop, recipe, prompts=(11, 7), ranks=None):
    """The table that a credit function is given, for two prompts and rewards that count up."""
    kept = {}

    def watching(advantage, edge, prompt, root, group, noisy):
        """Keep what it is given."""
        kept.update(edge=edge, prompt=prompt, root=root, group=group, noisy=noisy)
        return torch.where(edge >= 0, advantage[:, None], 0)

    recipe = recipe.but(credit=part(watching))
    tree, noisy = roll_out(toy(), recipe, loop.examples[:2], seed=0, iteration=0)
    leaves = len(tree.edge)
    table = RewardTable(
        torch.arange(leaves).float()[:, None], torch.ones(1), tree.group, torch.ones(leaves) > 0, ("count",)
    )
    found = earned(recipe, tree, noisy, table, prompts, {}, ranks or Ranks(), seed=0, iteration=0)
    return tree, kept, found


def test_a_prompt_keeps_the_number_that_names_it_for_good(toy, loop):
    """Data-set indices, not places in the update; where steps stand apart each is a group of the same prompt."""
    _, kept, found = seen_by(toy, loop, find("flow_grpo")())
    assert kept["prompt"].tolist() == [11] * 16 + [7] * 16 and kept["group"].tolist() == [0] * 16 + [1] * 16
    assert found.log["reward/count"] == 15.5
    _, kept, _ = seen_by(toy, loop, find("e_grpo")())
    assert kept["prompt"].tolist() == [11] * 96 + [7] * 96 and kept["group"].unique().tolist() == list(range(16))


@pytest.mark.parametrize(("key", "groups"), [("e_grpo", 16), ("tempflow_grpo", 2)])
def test_what_the_jumps_of_one_step_earn_sums_to_0(toy, loop, key, groups):
    """By prompt and step; everything else that they took earns nothing that is trained."""
    _, kept, found = seen_by(toy, loop, find(key)())
    earned_there = found.advantage * kept["noisy"]
    assert bool((kept["noisy"].sum(1) == 1).all()) and len(kept["group"].unique()) == groups
    for group in kept["group"].unique():
        rows = earned_there[kept["group"] == group].sum(1)
        assert rows.sum().item() == pytest.approx(0, abs=1e-4) and rows.abs().max() > 1


def test_a_jump_earns_the_sum_of_what_it_earns_in_each_granularity(toy, loop):
    """By the formula: a z-score for each stride among the twelve jumps of one state, added; one row is trained."""
    recipe = find("e_grpo")().but(rollout={"strides": (1, 2)})
    tree, noisy = roll_out(toy(), recipe, loop.examples[:2], seed=0, iteration=0)
    reward = torch.rand(len(tree.edge), 1, generator=torch.Generator().manual_seed(0))
    table = RewardTable(reward, torch.ones(1), tree.group, torch.ones(len(reward)) > 0, ("any",))
    found = earned(recipe, tree, noisy, table, (0, 1), {}, Ranks(), seed=0, iteration=0)
    scores = reward.view(2, 8, 2, 12)  # prompt, step, stride, jump
    z = (scores - scores.mean(-1, keepdim=True)) / (scores.std(-1, keepdim=True) + 1e-8)
    points = recipe.points(tree=tree, advantage=found.advantage, weight=found.weights[0])
    jumps = tree.noisy.nonzero()[:, 0]
    ours = torch.zeros(len(tree.source)).scatter(0, points.columns["edge"][:, 0], points.columns["advantage"][:, 0])
    of_leaf = torch.where(tree.noisy[tree.edge] & (tree.edge >= 0), tree.edge, 0).max(1).values.view(2, 8, 2, 12)
    assert torch.equal(of_leaf[:, :, 0], of_leaf[:, :, 1]) and len(points) == len(jumps) == 2 * 8 * 12
    torch.testing.assert_close(ours[of_leaf[:, :, 0]], z.sum(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(points.columns["weight"], torch.full((192, 1), 1 / 192))


@pytest.mark.parametrize("rule", [select.depth_pruned, select.parent_top, select.extremes], ids=lambda f: f.__name__)
def test_pruning_changes_gradients_and_neither_rewards_nor_advantages(toy, loop, rule):
    """What is left out keeps its part in the values of the edges above it."""
    whole, found, gradients = find("branch_grpo")(), [], []
    for recipe in (whole, whole.but(select=part(rule))):
        tree, noisy = roll_out(toy(), recipe, loop.examples[:2], seed=0, iteration=0)
        reward = torch.arange(len(tree.edge)).float()[:, None]
        table = RewardTable(reward, torch.ones(1), tree.group, torch.ones(len(reward)) > 0, ("count",))
        found.append(earned(recipe, tree, noisy, table, (0, 1), {}, Ranks(), seed=0, iteration=0))
        gradients.append(loop.gradient(toy(), recipe, 64, examples=loop.examples[:2]))
    assert (
        torch.equal(found[0].advantage, found[1].advantage)
        and gradients[0][1]["reward/red"] == gradients[1][1]["reward/red"]
    )
    assert (found[1].weights[0] > 0).sum() < (found[0].weights[0] > 0).sum()
    assert (gradients[0][0] - gradients[1][0]).norm() > 0.01 * gradients[0][0].norm()


def test_edges_and_roots_of_another_rank_are_numbered_on(toy, loop):
    """The second of two ranks that rolled out the same: its ids begin where the first one's end."""
    doubled = Ranks(1, 2, lambda rows: torch.cat([rows, rows]))
    tree, kept, found = seen_by(toy, loop, find("tree_grpo_visual")(), ranks=doubled)
    half = len(tree.edge)
    assert torch.equal(kept["root"][half:], tree.root + 2) and kept["root"].max() == 3
    assert kept["edge"][half:].min() == len(tree.source) and found.advantage.shape == tree.edge.shape


def test_stds_and_slopes_are_computed_where_a_part_asks_for_them_alone():
    sigmas = schedules.linear(10)
    plain, weighed = find("flow_grpo")(), find("tempflow_grpo")()
    assert of_kernel(plain, sigmas, noisy_steps(plain, sigmas, 0, 0)) == {}
    found = of_kernel(weighed, sigmas, noisy_steps(weighed, sigmas, 0, 0))
    assert torch.isclose(found["stds"][5], torch.tensor(0.7 * 0.1**0.5)), "eta sqrt(sigma / (1 - sigma)) at one half"
