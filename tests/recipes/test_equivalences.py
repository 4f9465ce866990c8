"""Methods that must be each other where their numbers say so, gradient by gradient on the toy in fp64."""

import pytest
import torch

import samplers.tree
from flowrl.advantages import outcome, tree
from flowrl.allocation import prompts
from flowrl.changes import changed
from flowrl.memory import trackers
from flowrl.objectives import chunks, penalties, ratios, score, select, weights
from flowrl.part import part
from flowrl.recipe import frozen
from flowrl.recipes import find
from flowrl.visual.trainer import roll_out
from samplers import fork_plans, kernels, noise, noise_plans


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


def equal(one, other, scale=1.0, tolerance=1e-9):
    assert float(one.norm()) > 0
    return float((one * scale - other).norm()) <= tolerance * float(other.norm())


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
    theirs, by_leaf = gradient(flat), forked.but(advantage=flat.advantage, credit=flat.credit)
    assert equal(gradient(forked), theirs) and equal(gradient(by_leaf), theirs)


def test_e_grpo_at_the_first_step_alone_compares_as_dance_grpo_does(gradient):
    """VisualGRPO's code is of DanceGRPO's line: the unbiased std of the group, and 1e-8."""
    first = {"steps": 10, "noisy": part(noise_plans.listed, at=(0,))}
    apart = find("e_grpo")().but(rollout=first)
    plan = first | {"forks": {0: 12}, "kernel": apart.rollout.kernel}
    assert equal(gradient(apart), gradient(find("dance_grpo")().but(rollout=plan, select=part(select.drawn))))


def test_tree_grpo_with_one_child_is_mix_grpo(gradient):
    """One path has nothing to back up: the leaf's advantage on all its edges."""
    window = part(noise_plans.window, start=2, width=3)
    lone = find("tree_grpo_visual")().but(rollout={"forks": {}, "roots": 6, "noisy": window})
    mixed = find("mix_grpo")().but(
        rollout={"steps": 10, "forks": {}, "roots": 6, "noisy": window}, advantage=lone.advantage
    )
    assert equal(gradient(lone), gradient(mixed))


PLAIN = {"rollout.kernel.growth": 0, "objective.sensitivity": 0, "penalties.best_path_mse": 0, "track": None}


def test_dynamic_tree_rpo_without_its_numbers_is_tree_grpo_backed_up_by_means(gradient):
    """No growth, sensitivity or imitation, two children."""
    dynamic = find("dynamic_tree_rpo")()
    tree_grpo = changed(find("tree_grpo_visual")(), {"rollout.forks.children": 2}).but(
        advantage=dynamic.advantage, credit=part(tree.tree_value)
    )
    tree_grpo = tree_grpo.but(rollout={"noisy": dynamic.rollout.noisy})
    theirs = gradient(tree_grpo)
    assert equal(gradient(changed(dynamic, PLAIN)), theirs) and not equal(gradient(dynamic), theirs)


def test_dynamic_tree_rpo_without_its_numbers_and_with_one_child_is_mix_grpo(gradient):
    lone = changed(find("dynamic_tree_rpo")(), PLAIN).but(rollout={"forks": {}, "roots": 6})
    mixed = find("mix_grpo")().but(rollout={"steps": 10, "forks": {}, "roots": 6}, advantage=lone.advantage)
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


TWELVE = {"rollout.forks.children": 12}


def test_e_grpo_where_nothing_is_merged_is_tempflow_grpo_without_weights(gradient):
    """Eight steps apart: the mean over one step at a time, the noise being the same wherever it is drawn."""

    def same(own):
        """Twelve siblings, whichever state they leave."""
        angle = torch.arange(24, dtype=own.dtype).view(12, 2)
        return torch.sin(1 + angle**2).expand(own.shape)

    apart = changed(find("e_grpo")(), {"rollout.noisy.threshold": -1e9} | TWELVE)
    one = find("tempflow_grpo")().but(rollout={"steps": 16, "roots": 1}, penalties=(), snapshots={})
    one = changed(one, TWELVE | {"credit": "broadcast", "rollout.noisy": "window", "rollout.noisy.width": 1})
    apart, one = (recipe.but(rollout={"noise": part(same)}, advantage=apart.advantage) for recipe in (apart, one))
    each = [gradient(changed(one, {"rollout.noisy.start": t})) for t in range(8)]
    assert equal(gradient(apart), sum(each) / 8) and not equal(gradient(apart), each[0])


def test_adagrpo_without_the_other_prompts_is_e_grpo_at_its_steps(gradient):
    """One candidate each, compared with its own group alone."""
    own = part(outcome.grpo, scope="group", ddof=1, eps=1e-8, clamp=5.0)
    alone = changed(find("adagrpo")(), {"pilot.candidates": 1}).but(advantage=own)
    listed = part(noise_plans.listed, at=(0, 2, 4, 6))
    assert equal(gradient(alone), gradient(find("e_grpo")().but(rollout={"noisy": listed}, advantage=own)))


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


def test_drm_with_one_candidate_is_the_plain_sampler_and_teaches_nothing(toy, loop, gradient, monkeypatch):
    """Four straight paths, nobody to be compared with.  The choice takes no draw here: the noises are the same."""
    monkeypatch.setattr(samplers.tree, "random_one", lambda score, generator: torch.zeros(1, dtype=torch.long))
    lone = find("drm_stepwise")().but(rollout={"forks": part(fork_plans.every_noisy, children=1)})
    straight = find("flow_grpo")().but(rollout={"roots": 4}, penalties=(), snapshots={})
    drawn, plain = (roll_out(toy(), r, loop.examples, seed=0, iteration=0)[0] for r in (lone, straight))
    assert torch.equal(drawn.states, plain.states) and torch.equal(drawn.edge, plain.edge)
    assert bool(gradient(straight).any()) and not gradient(lone).any()


def test_adagrpo_without_its_global_term_and_choice_is_jumps_at_four_steps(gradient):
    """One candidate prompt each, compared with their groups alone: E-GRPO at steps 0, 2, 4 and 6, nothing merged."""
    alone = part(outcome.grpo, scope="group", ddof=1, eps=1e-8, clamp=5.0)
    ours = find("adagrpo")().but(advantage=alone)
    one = ours.but(pilot=part(prompts.nearest_to_proficiency, candidates=1))
    host = find("e_grpo")().but(rollout={"noisy": part(noise_plans.listed, at=(0, 2, 4, 6))}, advantage=alone)
    assert equal(gradient(one), gradient(host))
    assert not equal(gradient(ours, prompts=4), gradient(host, prompts=4)), "of ten candidates one is trained"
    tilted = one.but(advantage=find("adagrpo")().advantage)
    assert not equal(gradient(tilted), gradient(host)), "the global term tilts"


def test_superflow_that_forgets_nothing_is_reinforce_against_a_running_mean(gradient):
    """Noise of one strength, so that steps earn alike; the mean counts one good and one bad picture before any other.

    Three updates of constant groups: (1 + 3 r) / (2 + 3) is expected of a prompt that scored r in each.
    """
    scored, memory = torch.tensor([0.2, 0.9]).double(), {}
    seen = torch.arange(2).repeat_interleave(6)
    for _ in range(3):
        _, memory = trackers.beta_counts(scored[seen][:, None], torch.ones(1).double(), seen, memory, kept=1.0)

    def against_running_mean(reward, prompt):
        above = reward[:, 0] - (1 + 3 * scored[prompt]) / 5
        return (above - above.mean()) / (above.std(unbiased=False) + 1e-4)

    paths = {"roots": 8, "kernel": part(kernels.dance_sde, eta=0.3)}
    ours = find("superflow")().but(rollout=paths, track=part(trackers.beta_counts, kept=1.0))
    plain = find("flow_grpo")().but(rollout=paths, advantage=part(against_running_mean))
    assert equal(gradient(ours, memory=memory), gradient(plain), tolerance=1e-6)
    assert not equal(gradient(ours), gradient(plain), tolerance=1e-3), "1/2 is expected of what was never seen"


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
