"""flowrl/recipe.py: a method is a Recipe, and one that cannot work says so in a line."""

from dataclasses import replace

import pytest

from flowrl import decays, updates
from flowrl import recipe as recipes
from flowrl.advantages import outcome
from flowrl.changes import changed
from flowrl.objectives import clipped, penalties, ratios, select
from flowrl.part import Part, part
from flowrl.recipe import Snapshot, copied, frozen
from flowrl.recipes import find
from flowrl.recipes.visual.forward import dgpo
from flowrl.recipes.visual.steps import dance_grpo, flow_grpo, grpo_guard
from flowrl.recipes.visual.trees import branch_grpo
from flowrl.visual.trainer import noisy_steps
from samplers import density, kernels, schedules


def refusal(build):
    with pytest.raises(ValueError) as caught:
        build()
    said = str(caught.value)
    assert "\n" not in said and said.endswith((".", "'"))
    return said


def test_every_recipe_builds_and_has_a_group_of_at_least_two(recipe):
    plan, sigmas = recipe.rollout, schedules.linear(recipe.rollout.steps)
    assert plan.leaves(tuple(noisy_steps(recipe, sigmas, 0, 0))) >= 2 and recipe.check() is recipe


def test_leaves_follow_from_roots_and_forks():
    """Children multiply along a path; where noisy steps stand apart, they add up."""
    everywhere = range(19)
    assert flow_grpo().rollout.leaves(everywhere) == 16 and dance_grpo().rollout.leaves(everywhere) == 12
    assert branch_grpo().rollout.leaves(everywhere) == 16
    assert branch_grpo().but(rollout={"roots": 3}).rollout.leaves(everywhere) == 48
    apart = branch_grpo().but(rollout={"roots": 3, "apart": True}).rollout
    assert apart.leaves((0, 3, 6, 7)) == 3 * 7 and apart.branches((0, 3, 6, 7)) == 4
    twice = replace(apart, strides=(1, 2))
    assert twice.leaves((0, 3, 6, 7)) == 2 * 3 * 7 and twice.branches((0, 3, 6, 7)) == 8
    assert branch_grpo().rollout.branches(everywhere) == 1


def test_a_part_tells_quantities_from_numbers_by_the_star():
    filled = part(penalties.kl_gaussian)
    assert filled.needs == ["mean", "mean_ref", "std"] and filled.name == "kl_gaussian"
    assert part(outcome.grpo, ddof=1).numbers == {"ddof": 1}


def test_a_part_is_called_by_name_whatever_else_is_known():
    def quotient(latents, std, *, scale=1.0):
        return scale * latents / std

    assert part(quotient, scale=3.0)(std=2.0, latents=4.0, sigma="not asked for") == 6.0
    assert part(quotient, scale=3.0).bound(4.0, 2.0) == 6.0


def test_an_unknown_number_is_refused_with_the_nearest_one():
    said = refusal(lambda: part(clipped.ppo_clip, clip_lo=1e-4))
    assert said == "ppo_clip takes no 'clip_lo'. Did you mean 'clip_low'? Numbers here: clip_low, clip_high."
    assert refusal(lambda: part(select.drawn, fraction=0.5)) == "drawn takes no 'fraction'. Numbers here: none."


def test_a_quantity_cannot_be_set_as_a_number():
    assert "takes no 'ratio'" in refusal(lambda: part(clipped.ppo_clip, ratio=1.0))


def test_a_number_without_a_default_must_be_given():
    def fixed(mask, *, length):
        return mask / length

    assert refusal(lambda: part(fixed)) == "fixed needs a value for 'length'."
    assert part(fixed, length=2)(mask=4) == 2


def test_a_group_of_one_is_refused():
    """C03: with the name of the setting and the reason."""
    said = refusal(flow_grpo().but(rollout={"roots": 1}).check)
    assert said.startswith("rollout.roots = 1 makes groups of one") and "all advantages are 0" in said


def test_a_missing_snapshot_is_refused():
    said = refusal(flow_grpo().but(snapshots={}).check)
    assert said == "a part asks for a quantity that ends in _ref, but snapshots has no 'ref'."


def test_a_snapshot_without_effect_is_refused():
    said = refusal(dance_grpo().but(snapshots={"anchor": frozen()}).check)
    assert said.startswith("snapshots.anchor has no effect")


@pytest.mark.parametrize(("name", "whose"), [("ema", "averaged weights of optimizer.ema"), ("current", "policy")])
def test_a_snapshot_with_a_name_that_is_kept_for_others_is_refused(name, whose):
    """Both would be one copy of the weights: refreshed by two rules, and evaluated and saved for the other."""
    namespace = {}
    exec(f"def drift(mean, mean_{name}):\n    return ((mean - mean_{name}) ** 2).flatten(2).mean(2)", namespace)
    own = flow_grpo().but(penalties=((1.0, part(namespace["drift"])),), snapshots={name: copied()})
    said = refusal(own.check)
    assert said.startswith(f"snapshots.{name}: '{name}' is the ") and whose in said and "such as 'anchor'" in said


def test_a_snapshot_named_old_must_exist_where_more_than_is_recorded_is_asked_for():
    """log_prob_old is recorded by the rollout; a velocity_old has to be computed, and mean_old in a second update."""

    def drift(velocity, velocity_old):
        return ((velocity - velocity_old) ** 2).flatten(2).mean(2)

    drifting = dance_grpo().but(penalties=((1.0, part(drift)),))
    assert "snapshots has no 'old'" in refusal(drifting.check)
    old = {"old": Snapshot(part(decays.constant, share=0.0))}
    assert drifting.but(snapshots=old).check()
    several = grpo_guard().check().but(update=part(updates.minibatches, count=2))
    assert "'mean_old' in more updates than one" in refusal(several.check)
    assert several.but(snapshots=several.snapshots | old).check()


@pytest.mark.parametrize("role", ["advantage", "credit", "select", "weight", "points", "ratio", "objective"])
def test_a_part_that_asks_for_an_unknown_quantity_is_refused_by_role(role):
    def strange(log_probb):
        return log_probb

    said = refusal(flow_grpo().but(**{role: part(strange)}).check)
    assert said.startswith(f"{role}: strange asks for 'log_probb'.") and "Known there: " in said


def test_the_nearest_quantity_is_named():
    def slip(lob_prob, log_prob_old):
        return lob_prob

    assert "Did you mean 'log_prob'?" in refusal(flow_grpo().but(ratio=part(slip)).check)


@pytest.mark.parametrize("name", ["group", "chunk", "edge", "reward", "tree"])
def test_an_objective_that_asks_for_what_a_row_does_not_have_is_refused_before_training(name):
    """Known to the vocabulary, but only while the table of an update is at hand."""
    namespace = {}
    exec(f"def coupled(ratio, {name}):\n    return ratio", namespace)
    said = refusal(flow_grpo().but(objective=part(namespace["coupled"])).check)
    assert f"objective: coupled asks for {name!r}" in said


def test_an_advantage_that_asks_for_what_comes_later_is_refused():
    def early(reward, mask):
        return reward

    assert "advantage: early asks for 'mask'" in refusal(flow_grpo().but(advantage=part(early)).check)


def test_a_kernel_that_asks_for_a_reward_is_refused():
    def greedy(latents, velocity, sigma, sigma_next, reward):
        return latents

    assert "rollout.kernel: greedy asks for 'reward'" in refusal(
        flow_grpo().but(rollout={"kernel": part(greedy)}).check
    )


def test_an_objective_on_the_ratio_without_a_ratio_is_refused():
    assert "ppo_clip asks for the ratio, but the recipe has none" in refusal(flow_grpo().but(ratio=None).check)


@pytest.mark.parametrize("key", ["grpo_guard", "flow_cps"])
def test_a_ratio_of_gaussians_with_a_density_that_is_none_is_refused(key):
    """Its log-ratio adds the KL, which takes the bias from Gaussian log-probs and from no squared errors."""
    by_errors = {"kernel": part(kernels.cps, eta=0.8), "density": part(density.squared_error)}
    recipe = find(key)().but(rollout=by_errors, ratio=part(ratios.guarded))
    said = refusal(recipe.check)
    assert said.startswith("ratio: guarded is one of Gaussian densities, and rollout.density = squared_error. Set ")
    recipe.but(rollout={"density": part(density.gaussian)}).check()


def test_a_recipe_needs_only_what_its_parts_ask_for():
    """C54: without a penalty nothing of the reference is asked for."""
    assert flow_grpo().needs - dance_grpo().needs == {"mean", "mean_ref", "std", "sigma", "sigma_next"}
    assert dance_grpo().needs == {"log_prob", "log_prob_old", "advantage"}


def test_rows_may_be_skipped_only_where_nothing_pulls_on_them():
    assert dance_grpo().skips_zero_advantage and not flow_grpo().skips_zero_advantage

    def loud(ratio, advantage):
        return -ratio * (advantage + 1)

    assert not dance_grpo().but(objective=part(loud)).skips_zero_advantage
    assert not dgpo().but(penalties=()).skips_zero_advantage, "a mean over peers would miss the rows left out"


def test_a_derived_recipe_leaves_its_parent_alone():
    parent = flow_grpo()
    child = parent.but(rollout={"steps": 4, "kernel": part(kernels.ode)}, penalties=())
    assert (child.rollout.steps, child.rollout.roots, parent.rollout.steps) == (4, 16, 10)
    assert parent == flow_grpo() and child.objective is parent.objective


def test_parts_come_in_the_order_in_which_they_act():
    roles = [role for role, filled in flow_grpo().parts() if isinstance(filled, Part)]
    assert roles == [
        *(f"rollout.{name}" for name in ("kernel", "density", "noisy", "noise")),
        *("advantage", "credit", "select", "update", "weight", "points", "ratio", "objective"),
        "penalties.kl_mean_over_s2",
    ]


def test_a_decay_may_warm_up():
    rule = Snapshot(part(decays.warming, share=0.9))
    assert rule.share_kept(1) == pytest.approx(2 / 11) and rule.share_kept(1000) == 0.9
    assert frozen().share_kept(1) == 1.0 and recipes.Snapshot(part(decays.constant, share=0.5)).share_kept(1) == 0.5


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("stepwise_flow_grpo", {"advantage": "rloo"}, "advantage = rloo has no effect: no part asks for advantage."),
        ("drm_stepwise", {"advantage": "best_and_worst"}, "advantage = best_and_worst has no effect"),
        ("tree_grpo_visual", {"objective": "reinforce"}, "ratio = per_decision has no effect: no part asks for ratio."),
        (
            "diffusion_nft",
            {"noising.elbo": "weighted"},
            "noising.elbo = weighted has no effect: no part asks for elbo.",
        ),
        (
            "flow_grpo",
            {"track": "per_prompt"},
            "track = per_prompt has no effect: no part asks for history_mean, history_",
        ),
        (
            "flow_grpo",
            {"rollout.noise": "correlated"},
            "rollout.noise = correlated has no effect: siblings alone share",
        ),
    ],
)
def test_a_part_that_nobody_asks_for_is_refused(name, changes, said):
    with pytest.raises(ValueError) as caught:
        changed(find(name)(), changes).check()
    assert str(caught.value).startswith(said)


def test_jumps_are_merged_by_the_noise_that_the_kernel_draws():
    """e_grpo: an eta of the kernel alone would leave the jumps as they were."""
    changes = {"rollout.kernel.eta": 0.5}
    with pytest.raises(ValueError, match=r"^rollout.noisy.eta = 0.7 and rollout.kernel.eta = 0.5: merged measures"):
        changed(find("e_grpo")(), changes).check()
    assert changed(find("e_grpo")(), changes | {"rollout.noisy.eta": 0.5}).check()


def test_counts_of_rewards_may_serve_the_choice_of_prompts_alone():
    """superflow with another advantage: its memory is what allocate looks at."""
    assert changed(find("superflow")(), {"advantage": "grpo"}).check().track.name == "beta_counts"
