"""flowrl/visual/duplicates.py: copies among the pictures of a group."""

from dataclasses import replace

import pytest

from flowrl import randomness
from flowrl.part import part
from flowrl.recipes.visual.forward import awm
from flowrl.recipes.visual.steps import flow_grpo
from flowrl.visual.duplicates import refuse_duplicates
from flowrl.visual.policy import Example
from flowrl.visual.trainer import roll_out


def the_same(own):
    """Siblings that all go where the first one goes."""
    return own[:, :1].expand_as(own)


def ignoring(monkeypatch, purpose):
    """Named generators that do not know the member, as ranks with one seed would have them."""
    named = randomness.generator

    def generator(seed, iteration, what, *member):
        return named(seed, iteration, what, *(member[:1] if what == purpose else member))

    monkeypatch.setattr(randomness, "generator", generator)


def test_copies_in_the_first_update_stop_the_run_before_it_scores(toy, loop, monkeypatch):
    """C42: awm follows the ODE, so one initial noise per group is one picture 24 times."""
    ignoring(monkeypatch, "initial noise")
    policy = toy(awm())
    with pytest.raises(RuntimeError) as caught:
        loop.update(policy, awm(), loop.learner(policy), score=lambda *given: pytest.fail("scored"))
    said = str(caught.value)
    assert said.startswith("23 of the 24 pictures of '0' are copies: their noise was the same. ") and "\n" not in said


def test_siblings_that_do_not_part_are_copies(toy):
    """Two roots of four: a leaf of each is left."""
    only = {"roots": 2, "forks": {0: 4}, "noisy": part(lambda steps: (0,)), "noise": part(the_same)}
    tree, _ = roll_out(toy(), flow_grpo().but(rollout=only), [Example("1"), Example("2")], seed=0, iteration=0)
    with pytest.raises(RuntimeError, match="6 of the 8 pictures of '1' are copies"):
        refuse_duplicates(tree, [Example("1")] * 8 + [Example("2")] * 8)


def test_either_noise_is_enough_and_another_update_does_not_look(toy, loop, monkeypatch):
    ignoring(monkeypatch, "initial noise")
    policy = toy(flow_grpo())
    assert loop.update(policy, flow_grpo(), loop.learner(policy))["reward/red"] > 0
    policy = toy(awm())
    assert loop.update(policy, awm(), loop.learner(policy), iteration=1)["group/zero_spread"] == 1.0


def test_equal_pictures_of_two_groups_and_leaves_of_one_state_are_no_copies(toy):
    tree, _ = roll_out(toy(), flow_grpo(), [Example("1"), Example("1")], seed=0, iteration=0)
    two = [Example("1")] * 32
    states = tree.states.clone()
    states[tree.final[16:]] = states[tree.final[:16]]
    refuse_duplicates(replace(tree, states=states), two)
    refuse_duplicates(replace(tree, final=tree.final.clone().fill_(3)), two)
