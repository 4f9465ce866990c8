"""flowrl/visual/pilot.py: one deterministic picture of every candidate decides what is rolled out."""

import pytest
import torch

from flowrl.changes import changed
from flowrl.recipes import find
from flowrl.visual.pilot import pilot
from flowrl.visual.ranks import Ranks
from rewards.table import RewardTable

NAMED = {"seed": 0, "iteration": 0, "batch_size": 64, "ranks": Ranks()}


def scoring(value, valid=(True,) * 4):
    def score(images, examples, group):
        assert len(images) == len(examples) == 4 and group.tolist() == [0, 1, 2, 3]
        return RewardTable(torch.tensor(value)[:, None], torch.ones(1), group, torch.tensor(valid), ("given",))

    return score


def test_the_candidate_nearest_to_all_candidates_mean_is_chosen_from_each_block(toy, loop):
    """Mean .5 of .1, .9, .45, .55; two blocks of two. The tracker has seen all four before."""
    recipe = changed(find("adagrpo")(), {"pilot.candidates": 2}).check()
    policy = toy(recipe)
    chosen, tracked, memory = pilot(policy, recipe, loop.examples, scoring([0.1, 0.9, 0.45, 0.65]), {}, **NAMED)
    assert float(tracked["proficiency_mean"]) == pytest.approx(0.525)
    assert chosen == [1, 2] and float(memory["proficiency/mean"]) == pytest.approx(0.525)
    assert policy.forwards == 4 * recipe.rollout.steps, "one path along the ODE each"


def test_a_candidate_without_a_score_is_never_chosen_and_counts_for_nothing(toy, loop):
    recipe = changed(find("adagrpo")(), {"pilot.candidates": 4}).check()
    score = scoring([0.5, 0.0, 0.4, 0.9], valid=(True, False, True, True))
    chosen, tracked, _ = pilot(toy(recipe), recipe, loop.examples, score, {}, **NAMED)
    assert float(tracked["proficiency_mean"]) == pytest.approx(0.6) and chosen == [0]


def test_no_score_at_all_stops_with_the_reason(toy, loop):
    recipe = find("adagrpo")().check()
    with pytest.raises(RuntimeError, match="none of 4 candidates could be scored, so no prompt can be chosen"):
        pilot(toy(recipe), recipe, loop.examples, scoring([0.0] * 4, valid=(False,) * 4), {}, **NAMED)


def test_an_update_rolls_out_what_was_chosen_and_remembers_the_candidates(toy, loop):
    """Four candidates, one prompt: 4 deterministic pictures and 4 x 12 jumps of it."""
    recipe, seen = find("adagrpo")(), []

    def score(images, examples, group):
        seen.append([e.prompt for e in examples])
        return loop.score(images, examples, group)

    policy = toy(recipe)
    log = loop.update(policy, recipe, loop.learner(policy), score=score)
    assert seen[0] == ["0", "1", "2", "3"] and len(seen[1]) == 48 and len(set(seen[1])) == 1
    assert log["train_calls"] == 4
