"""Changes to a recipe by name."""

import pytest

from flowrl.changes import MENUS, as_type, changed, imported, menu, part_for
from flowrl.recipe import frozen
from flowrl.recipes import find


def made(name, **changes):
    return changed(find(name)(), {key.replace("__", "."): value for key, value in changes.items()}).check()


def fault(name, **changes):
    with pytest.raises(ValueError) as caught:
        made(name, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_number_of_the_rollout_or_of_a_part_is_set_and_the_rest_stays():
    before = find("flow_grpo")()
    recipe = made("flow_grpo", rollout__steps="6", rollout__guidance="4", objective__clip_low="2e-4")
    assert (recipe.rollout.steps, recipe.rollout.guidance) == (6, 4.0)
    assert recipe.objective.numbers == {"clip_low": 2e-4, "clip_high": 1e-4}
    assert recipe.rollout.kernel == before.rollout.kernel and recipe.advantage == before.advantage


def test_functions_come_before_numbers_so_that_order_does_not_matter():
    one = changed(find("flow_grpo")(), {"rollout.kernel": "cps", "rollout.kernel.eta": 0.5})
    other = changed(find("flow_grpo")(), {"rollout.kernel.eta": 0.5, "rollout.kernel": "cps"})
    assert one == other and one.rollout.kernel.name == "cps" and one.rollout.kernel.numbers == {"eta": 0.5}


def test_a_function_of_ones_own_is_found_by_its_address():
    recipe = made("flow_grpo", advantage="flowrl.advantages.outcome:rloo", weight="flowrl.objectives.weights:edge_mean")
    assert (recipe.advantage.name, recipe.weight.name) == ("rloo", "edge_mean")


@pytest.mark.parametrize(
    ("role", "names"),
    [
        ("rollout.kernel", "cps dance_sde ddim ddim_sde flow_sde growing_sde linear_sde ode sage"),
        ("rollout.density", "gaussian squared_error"),
        (
            "rollout.noisy",
            "all_but_last decaying exp_decaying geometric_window listed merged progressive random_window single window "
            "window_and_forks",
        ),
        ("rollout.forks", "every_noisy first_noisy"),
        ("allocate", "by_expected"),
        ("pilot", "nearest_to_proficiency"),
        ("estimate", "as_drawn clean_estimate"),
        ("track", "adaptive_coefficient best_path beta_counts per_prompt proficiency self_paced"),
        ("chunks", "by_change fixed"),
        ("rollout.noise", "correlated independent scaled"),
        ("rollout.solver", "dpm_solver"),
        ("noising.times", "discrete logit_normal stratified uniform"),
        ("noising.elbo", "generalized_huber huber self_normalised weighted"),
        (
            "advantage",
            "against_expected against_history best_and_worst best_of_group cross_prompt dvao gd2po gdpo "
            "group_and_global grpo grpo_per_noise grpo_soft per_reward raw reward_itself rloo standardised",
        ),
        (
            "credit",
            "broadcast edge_softmax equalised gain leaf_sum noise_aware path_softmax per_dt per_slope siblings "
            "snr_aware tree_depthwise tree_depthwise_by_edge tree_depthwise_by_path tree_value",
        ),
        (
            "select",
            "depth_pruned drawn everything extremes kept parent_top preferred random_chunks random_steps "
            "weighted_chunks",
        ),
        ("update", "minibatches once reposition"),
        ("weight", "chunk_mean edge_mean token_mean"),
        ("points", "on_chunks on_noise on_path"),
        ("ratio", "elbo_per_draw elbo_per_row guarded per_decision per_row"),
        ("objective", "crd dgpo dpo dppo matching nft ppo_clip ppo_clip_by_outcome reinforce unclipped"),
        ("decay", "constant linear warming"),
        (
            "penalties",
            "best_path_mse kl_anchor_adaptive kl_gaussian kl_mean_over_s2 log_prob_drop_adaptive mean_mse velocity_mse "
            "velocity_mse_anchor velocity_mse_of_good x0_mse_old",
        ),
    ],
)
def test_the_menu_of_a_role_holds_its_functions_and_no_helper(role, names):
    """`edge_share`, `spread` and `bind` stand in the same files and cannot fill a role."""
    assert sorted(menu(role)) == names.split() and set(MENUS) >= {role}
    assert [part_for(role, name, role).name for name in names.split()] == names.split()


def test_a_number_that_a_function_must_have_may_come_in_a_setting_of_its_own():
    with pytest.raises(ValueError, match=r"needs_a_number needs a value for 'length': set weight.length"):
        made("flow_grpo", weight=f"{__name__}:needs_a_number").check()
    part = made("flow_grpo", weight=f"{__name__}:needs_a_number", weight__length=10).check().weight
    assert part.numbers == {"length": 10}


def needs_a_number(mask, *, length: int):
    """Divides by a constant."""
    return mask / length


def test_a_penalty_is_added_rescaled_and_taken_out():
    assert [scale for scale, _ in made("flow_grpo", penalties__kl_mean_over_s2="0.1").penalties] == [0.1]
    assert made("flow_grpo", penalties__kl_mean_over_s2=0).penalties == ()
    recipe = made("dance_grpo", penalties__velocity_mse=1e-3)
    assert [(scale, p.name) for scale, p in recipe.penalties] == [(1e-3, "velocity_mse")]


def test_a_reference_lives_only_as_long_as_something_asks_for_it():
    """C54: no penalty, no reference."""
    assert made("flow_grpo").snapshots == {"ref": frozen()}
    assert made("flow_grpo", penalties__kl_mean_over_s2=0).snapshots == {}
    assert made("dance_grpo", penalties__velocity_mse=1e-3).snapshots == {"ref": frozen()}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"objective__clip_low": float("nan")}, ["recipe.objective.clip_low = nan: expected float, a finite number"]),
        ({"credit": "edge_share"}, ["recipe.credit = 'edge_share': no such function"]),
        ({"nmae": "flow_grpo"}, ["recipe.nmae: no such setting.", "Did you mean 'name'?"]),
        ({"rollout__stepz": 3}, ["recipe.rollout.stepz: no such setting.", "Did you mean 'steps'?", "kernel"]),
        ({"rolout__steps": 3}, ["recipe.rolout.steps", "Did you mean 'rollout.steps'?"]),
        ({"objective__cliplow": 3}, ["no such number of ppo_clip", "Did you mean 'clip_low'?", "clip_low, clip_high"]),
        ({"objective": "ppo_clop"}, ["recipe.objective = 'ppo_clop'", "Did you mean 'ppo_clip'?", "Known:"]),
        ({"rollout__kernel": "flow_sd"}, ["Did you mean 'flow_sde'?", "Known:"]),
        ({"rollout__kernel": None}, ["rollout.kernel is missing: steps that draw noise need one"]),
        ({"rollout__steps": "many"}, ["recipe.rollout.steps = 'many': expected int"]),
        ({"rollout__steps": 2.5}, ["recipe.rollout.steps = 2.5: expected int"]),
        ({"rollout__steps": float("inf")}, ["recipe.rollout.steps = inf: expected int"]),
        ({"rollout__steps": True}, ["recipe.rollout.steps = True: expected int"]),
        ({"rollout__guidance": "strong"}, ["recipe.rollout.guidance = 'strong': expected float"]),
        ({"rollout__guidance": 0.5}, ["guidance = 0.5", "1"]),
        ({"rollout__strides": 2}, ["recipe.rollout.strides = 2: expected a list of numbers of levels", "[1, 2]"]),
        ({"rollout__strides": [1, "two"]}, ["recipe.rollout.strides = 'two': expected int"]),
        ({"rollout__strides": [1, 2]}, ["rollout.strides = [1, 2] has no effect: set rollout.apart = true"]),
        ({"rollout__forks": 3}, ["recipe.rollout.forks = 3", "{0: 2, 3: 2}"]),
        ({"rollout__roots": 1}, ["rollout.roots = 1 makes groups of one", "at least 2"]),
        ({"penalties__kl_mean_over_s3": 1}, ["Did you mean 'kl_mean_over_s2'?"]),
        ({"penalties__velocity_mse__x": 1}, ["has no penalty 'velocity_mse'", "It has: kl_mean_over_s2"]),
        ({"advantage__eps": "tiny"}, ["recipe.advantage.eps = 'tiny': expected float"]),
        ({"snapshots__ref__decay": 0.5}, ["recipe.snapshots.ref.decay = 0.5: expected the name of a function"]),
        ({"credit": "flowrl.nowhere:f"}, ["recipe.credit = 'flowrl.nowhere:f'", "cannot import 'flowrl.nowhere'"]),
        ({"credit": "flowrl.groups:f"}, ["'flowrl.groups' has no function 'f'"]),
        ({"credit": "flowrl.objectives.clipped:ppo_clip"}, ["credit: ppo_clip asks for 'ratio'"]),
        ({"rollout__kernel": "_reverse_sde"}, ["no such function", "dance_sde, ddim"]),
    ],
)
def test_a_change_that_cannot_be_made_is_one_line(changes, said):
    message = fault("flow_grpo", **changes)
    assert all(words in message for words in said), message


@pytest.mark.parametrize(
    ("name", "setting", "value", "said"),
    [
        ("chunk_grpo", "chunks.sizes", 5, "= 5: expected a list of int, such as [a, b]"),
        ("chunk_grpo", "chunks.sizes", "11", "= '11': expected a list of int, such as [a, b]"),
        ("chunk_grpo", "chunks.sizes", [8, 8.5], "= 8.5: expected int"),
        ("adagrpo", "rollout.noisy.at", 3, "= 3: expected a list of int, such as [a, b]"),
        ("superflow", "allocate.fewer", None, "= None: expected a list of int, such as [a, b]"),
        ("self_paced_grpo", "track.tau", 0.7, "= 0.7: expected a list of float, such as [a, b]"),
        ("self_paced_grpo", "track.tau", ["most"], "= 'most': expected float, a finite number"),
    ],
)
def test_a_list_of_numbers_is_held_to_its_type(name, setting, value, said):
    with pytest.raises(ValueError) as caught:
        changed(find(name)(), {setting: value})
    assert str(caught.value).startswith(f"recipe.{setting} {said}")


def test_a_list_of_numbers_may_come_as_words():
    assert changed(find("self_paced_grpo")(), {"track.tau": ["5e-1", 1]}).track.number("tau") == (0.5, 1.0)


@pytest.mark.parametrize(
    ("value", "kind", "typed"),
    [("1e-5", float, 1e-5), (3, float, 3.0), ("3", int, 3), (3.0, int, 3), (True, bool, True), ("x", str, "x")],
)
def test_a_value_is_read_as_the_type_it_should_have(value, kind, typed):
    assert as_type(value, kind, "x") == typed and isinstance(as_type(value, kind, "x"), kind)


@pytest.mark.parametrize(("value", "kind"), [(True, float), (1, bool), ("yes", bool), (1, str), (None, float)])
def test_a_value_of_another_kind_is_refused(value, kind):
    with pytest.raises(ValueError, match=f"^where = {value!r}: expected {kind.__name__}"):
        as_type(value, kind, "where")


def test_an_address_leads_to_the_object_behind_it():
    assert imported("flowrl.recipe:frozen", "x") is frozen
