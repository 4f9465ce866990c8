"""What a run will do, counted before a network is touched, against closed forms and against a spy."""

from dataclasses import replace

import pytest
import torch

from flowrl import plan
from flowrl.changes import changed
from flowrl.part import part
from flowrl.recipes import find
from samplers import schedules
from samplers.kernels import bind


def counted(name, **changes):
    recipe = changed(find(name)(), {key.replace("__", "."): value for key, value in changes.items()}).check()
    return plan.count(recipe, schedules.linear(recipe.rollout.steps))


def fault(name, **changes):
    with pytest.raises(ValueError) as caught:
        counted(name, **changes)
    return str(caught.value)


def test_branch_grpo_on_twenty_steps_has_the_published_tree():
    """Forks at 0, 3, 6, 9: 1 root, 2 states for 3 steps, 4 for 3, 8 for 3, then 16 for 11 steps."""
    n = counted("branch_grpo")
    assert (n.leaves, n.edges, n.states, n.rollout_calls) == (16, 218, 219, 203)
    assert (n.train_edges, n.train_calls) == (202, 187)
    assert (n.forwards, n.backwards) == (203 + 187, 187)


def test_a_straight_rollout_has_a_call_per_step_and_leaf():
    """16 x 10 states are left and 16 x 9 steps trained; with a reference each trained call is two forwards."""
    n = counted("flow_grpo")
    assert (n.leaves, n.edges, n.states, n.rollout_calls) == (16, 160, 176, 160)
    assert (n.train_edges, n.train_calls, n.forwards, n.backwards) == (144, 144, 160 + 2 * 144, 144)
    assert counted("flow_grpo", penalties__kl_mean_over_s2=0).forwards == 160 + 144


def test_guidance_doubles_forwards_and_backwards_but_no_call():
    plain, guided = counted("flow_grpo_fast"), counted("flow_grpo_fast", rollout__guidance=4)
    assert (guided.forwards, guided.backwards) == (2 * plain.forwards, 2 * plain.backwards)
    assert (guided.rollout_calls, guided.train_calls) == (plain.rollout_calls, plain.train_calls)


def test_a_window_trains_its_steps_and_keeps_the_states_around_them():
    n = counted("flow_grpo_fast")
    assert (n.train_edges, n.train_calls) == (16 * 3, 16 * 3) and n.states_stored == 16 * (4 + 1)


def test_shared_noise_is_one_call_at_the_first_step():
    n = counted("dance_grpo")
    assert (n.leaves, n.rollout_calls, n.edges) == (12, 1 + 15 * 12, 16 * 12)
    assert n.train_edges == 12 * int(0.6 * 15)


def test_several_optimizer_steps_are_counted_over_all_prompts():
    """C17: whole groups need as many prompts as updates, and leaves of all prompts are shared out."""
    recipe = changed(find("dgpo")(), {"update": "minibatches", "update.count": 2, "update.whole_groups": True}).check()
    n, sigmas = plan.count(recipe, schedules.linear(10), prompts=2), schedules.linear(10)
    assert (n.optimizer_steps, n.leaves, n.rollout_calls, n.train_calls) == (2, 32, 320, 2 * 16 * 4)
    with pytest.raises(ValueError, match="2 minibatches of 1 groups"):
        plan.count(recipe, sigmas, prompts=1)
    small = {"rollout.roots": 2, "update": "minibatches", "update.count": 3, "update.epochs": 2}
    n = plan.count(changed(find("flow_grpo")(), small).check(), sigmas, prompts=2)
    assert (n.optimizer_steps, n.train_edges) == (6, 2 * 2 * 2 * 9)


@pytest.mark.parametrize("name", ["flow_grpo", "branch_grpo", "diffusion_dpo"])
def test_prompts_multiply_what_one_costs(name):
    recipe = find(name)().check()
    one, three = (plan.count(recipe, schedules.linear(recipe.rollout.steps), prompts=n) for n in (1, 3))
    for field in (
        "leaves",
        "states",
        "states_stored",
        "edges",
        "rollout_calls",
        "train_calls",
        "forwards",
        "backwards",
    ):
        assert getattr(three, field) == 3 * getattr(one, field), field


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            "flow_grpo",
            {"rollout.noisy": "window", "rollout.noisy.start": 6},
            "rollout.noisy: a window of 4 steps from step 6 on does not fit: steps 0..8 of 10 may draw noise",
        ),
        ("dynamic_tree_rpo", {"rollout.noisy.width": 0}, "rollout.noisy: a window of 0 steps from step 0 on"),
        ("branch_grpo_mix", {"rollout.noisy.width": 20}, "rollout.noisy: a window of 20 steps"),
        ("adagrpo", {"rollout.noisy.at": [0, 15]}, "rollout.noisy: a window of 1 steps from step 15 on"),
        ("flow_grpo", {"rollout.kernel.eta": 0}, "rollout.kernel flow_sde draws no noise at step 0"),
        ("flow_cps", {"rollout.kernel.eta": 0}, "rollout.kernel cps draws no noise at step 0"),
        ("ddpo", {"rollout.kernel.eta": 1.5}, "rollout.kernel: ddim: eta = 1.5 is no share of the noise"),
        ("dance_grpo", {"rollout.kernel": "ode"}, "rollout.kernel ode draws no noise at step 0"),
        ("flow_grpo", {"rollout.steps": 1}, "rollout.noisy names no step"),
        ("flow_grpo", {"rollout.steps": 0}, "steps must be at least 1"),
        ("flow_grpo_fast", {"rollout.steps": 4}, "a window of 3 steps does not fit"),
        ("dance_grpo", {"rollout.forks": {15: 2}}, "rollout.forks: {15: 2} makes no different children"),
        ("flow_grpo_fast", {"rollout.forks": {9: 2}}, "rollout.forks: {9: 2} makes no different children"),
        ("dance_grpo", {"rollout.forks": {0: 4, 1: 1}}, "rollout.forks: {1: 1} makes no different children"),
        ("branch_grpo", {"rollout.forks": {0: 0}}, "rollout.forks: {0: 0} makes no different children"),
        ("tree_grpo_visual", {"rollout.forks.children": 0}, "0} makes no different children; fork at a noisy step"),
        ("flow_grpo", {"advantage": "grpo_per_noise"}, "advantage = grpo_per_noise: 0 for every decision that is"),
        ("tempflow_grpo", {"advantage": "grpo_per_noise", "rollout.forks": {}}, "groups of one member"),
        ("chunk_grpo", {"rollout.noisy": "window"}, "steps 5 to 8 are a chunk of which none draws noise"),
        ("flow_grpo", {"advantage.scope": "grup"}, "scope 'grup': accepted are group, batch, none"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(name, changes, said):
    """C26: the last step never draws; C27: without noise there is no density."""
    recipe = changed(find(name)(), changes).check()
    with pytest.raises(ValueError) as caught:
        plan.count(recipe, schedules.linear(recipe.rollout.steps))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_plan_of_ones_own_that_draws_at_the_last_step_is_refused():
    """C26: "step 9 of 10 has zero transition noise (sigma_next = 0)"."""

    def everything(steps):
        return tuple(range(steps))

    recipe = find("flow_grpo")().but(rollout={"noisy": part(everything)})
    with pytest.raises(ValueError, match=r"step 9 of 10 has zero transition noise \(sigma_next = 0\)"):
        plan.count(recipe, schedules.linear(10))


@pytest.mark.parametrize("shift", [1.0, 3.0, 12.0])
@pytest.mark.parametrize("steps", [2, 10, 28])
def test_the_first_step_has_a_finite_std_on_every_grid(drawing, steps, shift):
    """C28: sigma = 1 makes 1 / (1 - sigma) infinite; a plan that passes has a std at step 0."""
    sigmas = schedules.shifted(schedules.linear(steps), shift=shift)
    kernel = bind(drawing.rollout.kernel.bound, sigmas=sigmas, depth=torch.tensor(0))
    _, std = kernel(torch.zeros(1, 1), torch.zeros(1, 1), sigmas[:1], sigmas[1:2])
    assert 0 < float(std) < 10
    plan.check(drawing.but(rollout={"steps": steps, "forks": {0: 2}}, estimate=None), {0: 1}, sigmas)


def test_counts_are_what_a_spy_counts(recipe, toy, loop):
    """C53: one update on the toy, which knows no guidance: a guided reference counts once there."""
    recipe = recipe.but(snapshots={name: replace(rule, guidance=None) for name, rule in recipe.snapshots.items()})
    recipe = changed(recipe, {"pilot.candidates": 1}) if recipe.pilot else recipe
    policy = toy(recipe)
    loop.update(policy, recipe, loop.learner(policy), examples=loop.examples[:1])
    expected = plan.count(recipe, policy.sigmas(recipe.rollout.steps))
    assert (policy.forwards, policy.backwards) == (expected.forwards, expected.backwards)


def test_chunks_that_do_not_add_up_are_refused_before_a_rollout():
    recipe = changed(find("chunk_grpo")(), {"rollout.steps": 12}).check()
    with pytest.raises(ValueError, match="12 steps have 11 that draw noise"):
        plan.count(recipe, schedules.linear(12))


def test_pruning_that_leaves_nothing_is_refused():
    recipe = changed(
        find("branch_grpo_depth_pruned")(), {"select.first": 1, "select.count": 19, "select.stop": 1}
    ).check()
    with pytest.raises(ValueError, match="select: depth_pruned leaves no decision to train at iteration 0"):
        plan.count(recipe, schedules.linear(20))


def test_pruning_that_leaves_nothing_at_a_later_iteration_is_refused_too():
    """A window over 19 depths that slides from depth 3 up, and at iteration 60 lies on all that draw."""
    recipe = changed(
        find("branch_grpo_depth_pruned")(), {"select.first": 3, "select.count": 19, "select.stop": 1}
    ).check()
    plan.check_all(recipe, schedules.linear(20), seed=0, updates=60)
    with pytest.raises(ValueError, match="select: depth_pruned leaves no decision to train at iteration 60"):
        plan.check_all(recipe, schedules.linear(20), seed=0, updates=61)


def test_e_grpo_in_two_granularities_finishes_and_scores_every_jump_twice():
    """Eight jumps of twelve, over every other level on the second way; what is trained stays the same."""
    grid = schedules.shifted(schedules.linear(16), shift=3.0)
    once, twice = (plan.count(changed(find("e_grpo")(), {"rollout.strides": s}), grid) for s in ([1], [1, 2]))
    assert (once.leaves, twice.leaves, twice.scored) == (96, 192, 192)
    landed = [1, 2, 3, 4, 5, 7, 8, 9]  # the last three of the jumps span two steps
    assert once.rollout_calls == 8 + 12 * sum(16 - level for level in landed)
    assert twice.rollout_calls == once.rollout_calls + 12 * sum(-(-(16 - level) // 2) - 1 for level in landed)
    assert (twice.train_edges, twice.train_calls, twice.backwards) == (once.train_edges, once.train_calls, 8)


def test_an_update_in_two_granularities_costs_what_is_planned(toy, loop):
    """C53, with a reward that tells leaves apart: 192 pictures are scored for 8 trained calls."""
    recipe = changed(find("e_grpo")(), {"rollout.strides": [1, 2]}).check()
    policy, seen = toy(recipe), []

    def score(images, examples, group):
        seen.append((len(images), group.bincount().tolist()))
        return loop.score(images, examples, group)

    log = loop.update(policy, recipe, loop.learner(policy), examples=loop.examples[:1], score=score)
    expected = plan.count(recipe, policy.sigmas(16))
    assert (policy.forwards, policy.backwards) == (expected.forwards, expected.backwards)
    assert seen == [(192, [12] * 16)] and log["train_calls"] == 8 and log["ratio/deviation"] < 1e-5


def test_a_stride_past_the_end_is_refused():
    said = fault("e_grpo", rollout__strides=[1, 8])
    assert said.startswith("rollout.strides: a stride of 8 from step 11 on") and said.endswith("16 steps leave 5.")


def test_a_merge_past_the_end_is_refused():
    def too_long(steps):
        return {0: steps}

    recipe = find("e_grpo")().but(rollout={"noisy": part(too_long)})
    with pytest.raises(ValueError, match=r"rollout\.noisy: a jump from step 0 over 16 steps: it spans 1 or more"):
        plan.count(recipe, schedules.linear(16))


def test_groups_of_one_that_memory_would_allocate_are_refused_before_a_rollout():
    recipe = changed(find("superflow")(), {"rollout.roots": 4}).check()
    with pytest.raises(ValueError, match=r"group sizes \[1, 2, 3, 4\]: expected one or more, each of 2 or more"):
        plan.check_all(recipe, schedules.linear(10), seed=0, updates=1)


def test_fewer_prompts_than_memory_has_to_choose_are_refused_with_the_real_numbers():
    recipe = find("superflow")()
    plan.check_allocation(recipe, prompts=8, per_update=8)
    with pytest.raises(ValueError, match=r"^budget.prompts_per_update = 8 of 3 prompts: allocate = by_expected: 8"):
        plan.check_allocation(recipe, prompts=3, per_update=8)


@pytest.mark.parametrize(
    ("name", "prompts", "scored"),
    [("flow_grpo", 2, 32), ("stepwise_flow_grpo", 2, 322), ("adagrpo", 2, 2 * 48 + 20), ("drm_stepwise", 1, 224)],
)
def test_pictures_on_the_way_and_candidates_are_scored_too(name, prompts, scored):
    """What an expensive reward costs: leaves, clean estimates of every state, a picture of every candidate."""
    recipe = find(name)()
    assert plan.count(recipe, schedules.linear(recipe.rollout.steps), prompts=prompts).scored == scored
