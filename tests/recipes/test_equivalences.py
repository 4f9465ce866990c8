"""Methods that must be each other where their numbers say so, gradient by gradient on the toy in fp64."""

import pytest
import torch

from flowrl.advantages import outcome, tree
from flowrl.objectives import chunks, penalties, ratios, score, select, weights
from flowrl.part import part
from flowrl.recipe import frozen
from flowrl.recipes import find
from samplers import noise, noise_plans


@pytest.fixture
def gradient(toy, loop):
    """The gradient of one update of a recipe, from the same toy; with `moved`, off its snapshots."""

    def of(recipe, prompts=2, moved=False, **changes):
        policy = toy(dtype=torch.float64)
        for time in range(1 + moved):
            with torch.no_grad():
                for _, parameter in policy.trainable():
                    draw = torch.Generator().manual_seed(3 + time)
                    parameter.add_(0.02 * torch.randn(parameter.shape, generator=draw))
            for name, rule in recipe.check().snapshots.items() if time == 0 else ():
                policy.snapshot(name, rule, 0)
        found, _ = loop.gradient(policy, recipe, 50, examples=loop.examples[:prompts], **changes)
        return found

    return of


def equal(one, other, scale=1.0):
    assert float(one.norm()) > 0
    return float((one * scale - other).norm()) <= 1e-9 * float(other.norm())


def test_branch_grpo_without_forks_is_a_straight_rollout(gradient):
    """Sixteen roots, no split: edges of one depth are compared as leaves are, and each transition has one leaf."""
    straight = find("branch_grpo")().but(rollout={"forks": {}, "roots": 16, "noise": part(noise.independent)})
    plain = straight.but(
        advantage=part(outcome.grpo, scope="group", ddof=1, eps=1e-8, clamp=5.0),
        credit=part(tree.broadcast),
        weight=part(weights.token_mean),
    )
    assert equal(gradient(straight), gradient(plain))


def test_branch_grpo_forked_at_the_first_step_alone_is_a_group_with_one_noise(gradient):
    forked = find("branch_grpo")().but(rollout={"forks": {0: 8}, "noise": find("dance_grpo")().rollout.noise})
    flat = find("dance_grpo")().but(
        rollout={"steps": 20, "forks": {0: 8}}, select=part(select.drawn), objective=forked.objective
    )
    assert equal(gradient(forked), gradient(flat))


def test_tree_grpo_with_one_child_is_mix_grpo(gradient):
    """One path has nothing to back up: the leaf's advantage on all its edges."""
    window = part(noise_plans.window, start=2, width=3)
    lone = find("tree_grpo_visual")().but(rollout={"forks": {}, "roots": 6, "noisy": window})
    mixed = find("mix_grpo")().but(
        rollout={"steps": 10, "forks": {}, "roots": 6, "noisy": window}, advantage=lone.advantage
    )
    assert equal(gradient(lone), gradient(mixed))


def test_the_score_function_is_the_clipped_ratio_on_the_first_update(gradient):
    clipped = find("tree_grpo_visual")()
    assert equal(gradient(clipped), gradient(clipped.but(ratio=None, objective=part(score.reinforce))))


def test_tempflow_grpo_without_weights_and_with_noise_everywhere_is_flow_grpo(gradient):
    flow = find("flow_grpo")().but(advantage=find("tempflow_grpo")().advantage)
    everywhere = find("tempflow_grpo")().but(
        rollout={"noisy": flow.rollout.noisy, "forks": {}, "roots": 16}, credit=part(tree.broadcast)
    )
    assert equal(gradient(everywhere), gradient(flow))


def test_a_single_noisy_step_apart_is_a_single_noisy_step(gradient):
    """E-GRPO where nothing is merged is TempFlow-GRPO without weights, one step at a time."""
    tempflow = find("tempflow_grpo")().but(
        rollout={"noisy": part(noise_plans.window, start=3, width=1)}, credit=part(tree.broadcast)
    )
    assert equal(gradient(tempflow.but(rollout={"apart": True})), gradient(tempflow))


def test_chunks_of_one_step_are_steps(gradient):
    """And so is any chunk on the first, on-policy update: the gradients of a row's decisions are summed."""
    base = find("chunk_grpo")().but(
        rollout={"steps": 6, "forks": {0: 4}}, select=part(select.drawn), chunks=part(chunks.fixed, sizes=(1,) * 5)
    )
    stepwise = find("dance_grpo")().but(
        rollout={"steps": 6, "forks": {0: 4}, "kernel": base.rollout.kernel},
        select=part(select.drawn),
        objective=base.objective,
    )
    alone = gradient(base)
    assert equal(alone, gradient(stepwise))
    whole = gradient(base.but(chunks=part(chunks.fixed, sizes=(5,))))
    assert equal(whole, alone), "each of five decisions weighs a fifth of a chunk"


def test_a_guarded_ratio_is_the_plain_one_times_the_noise(gradient):
    """On the first update: credit / std in the place of 1 / dt leaves Flow-GRPO's gradient."""

    def per_std(advantage, edge, stds):
        """Undo what the guarded ratio multiplies."""
        return tree.broadcast(advantage, edge) / stds

    plain = find("flow_grpo")().but(penalties=(), snapshots={})
    assert equal(gradient(plain.but(ratio=part(ratios.guarded), credit=part(per_std))), gradient(plain))


@pytest.mark.parametrize("key", ["gdpo", "gd2po"])
def test_one_reward_is_the_z_score_of_its_group_up_to_a_factor(gradient, key):
    """Whitening a z-score over the batch changes its scale by its eps alone."""
    one = find(key)().but(penalties=(), snapshots={})
    plain = one.but(advantage=part(outcome.grpo, scope="group", ddof=0, eps=1e-6, clamp=1e9), select=part(select.drawn))
    ours, theirs = gradient(one), gradient(plain)
    assert float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0)) > 1 - 1e-9
    assert float(ours.norm() / theirs.norm()) == pytest.approx(1, rel=1e-3)


def test_dvao_with_one_reward_is_grpo(gradient):
    one = find("dvao")()
    plain = one.but(advantage=part(outcome.grpo, scope="group", ddof=0, eps=1e-8, clamp=1e9))
    assert equal(gradient(one), gradient(plain))


def test_self_paced_with_one_reward_is_its_parent(gradient):
    paced = find("self_paced_grpo")()
    assert equal(gradient(paced), gradient(paced.but(track=None)))


def test_loo_is_the_centred_reward_times_k_over_k_minus_1(gradient):
    loop = find("loop")().but(rollout={"steps": 6})
    centred = loop.but(advantage=part(outcome.grpo, scope="none", clamp=1e9))
    assert equal(gradient(centred), gradient(loop), scale=4 / 3)


def test_a_penalty_stays_outside_of_what_credit_multiplies(gradient):
    """D18: multipliers of tempflow_grpo scale the advantage alone; at zero advantage only the penalty pulls.

    As it does without them; were they in the weight, it would pull otherwise.
    """

    def multiplied(mask, stds):
        return weights.token_mean(mask) * (stds / stds[:-1].mean())

    recipe = find("tempflow_grpo")().but(
        advantage=part(outcome.grpo, clamp=0.0),
        penalties=((1.0, part(penalties.velocity_mse)),),
        snapshots={"ref": frozen()},
    )
    plain = recipe.but(credit=part(tree.broadcast))
    pull = gradient(plain, moved=True)
    assert equal(gradient(recipe, moved=True), pull)
    assert not equal(gradient(plain.but(weight=part(multiplied)), moved=True), pull)
