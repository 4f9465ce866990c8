"""flowrl/visual/paths.py: what states on the way are worth, and where the best paths lead."""

import pytest
import torch

from flowrl.part import part
from flowrl.recipes import find
from flowrl.visual.paths import along_paths, of_best_paths, per_edge, score_finished
from flowrl.visual.policy import Example
from flowrl.visual.trainer import roll_out
from rewards.table import RewardTable
from samplers import estimates

EXAMPLES, ONE = [Example("1"), Example("2")], torch.ones(1)


def table_of(images, group):
    """The first pixel's red as the reward."""
    return RewardTable(images[:, 0].flatten(1)[:, :1], ONE, group, torch.ones(len(images)) > 0, ("red",))


@pytest.fixture
def rolled(toy):
    def make(key, **changes):
        recipe, policy = find(key)().but(**changes), toy()
        tree, _ = roll_out(policy, recipe, EXAMPLES, seed=0, iteration=0)
        roots = recipe.rollout.roots
        return recipe, policy, tree, [EXAMPLES[r // roots] for r in tree.root.tolist()]

    return make


def test_every_distinct_state_is_scored_once_and_a_leaf_reads_its_own_path(rolled):
    """stepwise_flow_grpo: two noises, 16 paths of ten steps; a one-step estimate is latents - sigma * velocity."""
    recipe, policy, tree, examples = rolled("stepwise_flow_grpo")
    recipe = recipe.but(estimate=find("drm_stepwise")().estimate)
    scored = []

    def score(images, who, group):
        scored.append(len(images))
        return table_of(images, group)

    first = table_of(policy.decode(tree.leaves()), tree.group)
    table, states = along_paths(recipe, tree, first, examples, policy.velocity, policy.decode, score)
    assert sum(scored) == 2 * (1 + 16 * 9) and states.shape == (32, 11) and bool(table.valid.all())
    assert torch.equal(states[:, -1], first.total()) and len(states[:16, 0].unique()) == 1
    leaf, t = 20, 4
    row = tree.source[tree.edge[leaf, t]]
    latents, sigma = tree.states[row][None], tree.sigmas[t][None]
    with torch.no_grad():
        clean = latents - sigma[:, None] * policy.velocity(latents, sigma, tree.prompt[leaf][None])
    assert states[leaf, t].item() == pytest.approx(policy.decode(clean)[0, 0].item(), abs=1e-6)


def test_a_linear_reward_of_one_step_estimates_is_that_of_tweedies_formula(rolled):
    """stepwise_flow_grpo, T' = 1: x - sigma v at every state of a path, the finished one as it is."""
    recipe, policy, tree, examples = rolled("stepwise_flow_grpo")
    recipe, slope = recipe.but(estimate=find("drm_stepwise")().estimate), torch.tensor([2.0, -1.0])

    def linear(latents, who, group):
        return RewardTable((latents @ slope)[:, None], ONE, group, torch.ones(len(latents)) > 0, ("linear",))

    first = linear(tree.leaves(), examples, tree.group)
    _, states = along_paths(recipe, tree, first, examples, policy.velocity, lambda latents: latents, linear)
    path = torch.stack([tree.states[tree.source[edges]] for edges in tree.edge.T], 1)
    with torch.no_grad():
        sigma = tree.sigmas[:-1].expand(path.shape[:2])
        v = policy.velocity(path.flatten(0, 1), sigma.flatten(), tree.prompt.repeat_interleave(path.shape[1]))
    clean = path - sigma[..., None] * v.view(path.shape)
    torch.testing.assert_close(states, torch.cat([clean, tree.leaves()[:, None]], 1) @ slope, atol=1e-5, rtol=0)


def test_a_leaf_whose_estimate_failed_is_invalid_and_the_others_are_not(rolled):
    recipe, policy, tree, examples = rolled("stepwise_flow_grpo")
    lost = tree.source[tree.edge[3, 5]]
    gone = policy.decode(tree.states[lost][None])

    def score(images, who, group):
        found = table_of(images, group)
        found.valid[(images == gone).flatten(1).all(1)] = False
        return found

    first = table_of(policy.decode(tree.leaves()), tree.group)
    table, _ = along_paths(
        recipe.but(estimate=part(estimates.as_drawn)), tree, first, examples, policy.velocity, policy.decode, score
    )
    assert (~table.valid).nonzero().flatten().tolist() == [3]


def test_candidates_are_told_what_their_path_came_to_and_scored_where_they_end(rolled):
    """drm_stepwise: one finished picture for each of four noises, 45 candidates that were left beside it."""
    recipe, policy, tree, examples = rolled("drm_stepwise")
    asked = []

    def score(images, who, group):
        asked.append(len(images))
        return table_of(images, group)

    table = score_finished(tree, examples, policy.decode, score)
    assert asked == [8] and len(table.value) == 8 * (1 + 5 * 9) and int(tree.finished.sum()) == 8
    for root in range(8):
        assert len(table.value[tree.root == root].unique()) == 1
    _, states = along_paths(recipe, tree, table, examples, policy.velocity, policy.decode, score)
    ended = (~tree.finished).nonzero()[0, 0]
    last = int((tree.edge[ended] >= 0).sum())
    assert bool(states[ended, : last + 1].isfinite().all()) and bool(states[ended, last + 1 :].isnan().all())


def test_best_velocities_are_those_of_the_best_leafs_path_at_the_same_step(rolled):
    """dynamic_tree_rpo: edges of the best path look at their own state, others at its."""
    recipe, policy, tree, _ = rolled("dynamic_tree_rpo")
    table = table_of(policy.decode(tree.leaves()), tree.group)
    with torch.no_grad():
        (column,) = of_best_paths(recipe, tree, table, policy.velocity)
    assert column.table.shape == (2 * 4, 2), "two prompts, four steps in the window"
    for group in (0, 1):
        members = (tree.group == group).nonzero().flatten()
        best = members[table.total()[members].argmax()]
        for leaf in members[:3].tolist():
            for t in (t for t in range(10) if bool(tree.noisy[tree.edge[leaf, t]])):
                ahead = tree.edge[best, t]
                latents, sigma = tree.states[tree.source[ahead]][None], tree.sigmas[t][None]
                with torch.no_grad():
                    ours = policy.velocity(latents, sigma, tree.prompt[best][None])[0]
                torch.testing.assert_close(column.table[column.of_edge[tree.edge[leaf, t]]], ours, atol=1e-6, rtol=0)


def test_what_leaves_agree_on_belongs_to_their_edges(rolled):
    _, _, tree, _ = rolled("tree_grpo_visual")
    of_edge = per_edge(tree, tree.group + 5)
    assert bool((of_edge[tree.edge] == tree.group[:, None] + 5).all()) and set(of_edge.tolist()) == {5, 6}
