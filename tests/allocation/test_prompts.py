"""flowrl/allocation/prompts.py: which prompts an update trains on."""

import pytest
import torch

from flowrl.allocation.prompts import by_weight, nearest_to_proficiency, shuffled
from flowrl.randomness import generator


def choose(count, per_update, iteration, seed=0):
    return shuffled(count, per_update, iteration, lambda number: generator(seed, "prompts", number))


def test_the_prompts_of_an_update_do_not_depend_on_what_was_asked_before():
    """C16: a pure function of the seed and the iteration."""
    forwards = [choose(7, 3, i) for i in range(12)]
    backwards = [choose(7, 3, i) for i in reversed(range(12))][::-1]
    assert forwards == backwards and all(len(chosen) == 3 for chosen in forwards)


def test_a_pass_holds_every_prompt_once_also_across_updates():
    """Five does not divide seven: an update may lie across two passes."""
    order = [index for i in range(21) for index in choose(7, 5, i)]
    for first in range(0, len(order), 7):
        assert sorted(order[first : first + 7]) == list(range(7))


def test_passes_and_seeds_have_orders_of_their_own():
    passes = {tuple(choose(20, 20, i)) for i in range(4)} | {tuple(choose(20, 20, 0, seed=1))}
    assert len(passes) == 5


def test_more_prompts_may_be_asked_for_than_there_are():
    assert sorted(choose(3, 6, 0)) == [0, 0, 1, 1, 2, 2]


def test_prompts_are_drawn_by_their_weight_and_never_twice():
    weight = torch.tensor([1.0, 0.0, 3.0, 1.0])
    drawn = [by_weight(weight, 2, generator(0, i)) for i in range(2000)]
    assert all(len(set(d)) == 2 and 1 not in d for d in drawn)
    assert sum(d[0] == 2 for d in drawn) / 2000 == pytest.approx(0.6, abs=0.04)
    assert by_weight(weight, 2, generator(7)) == by_weight(weight, 2, generator(7))
    with pytest.raises(ValueError, match="4 different prompts of 3 that have a weight"):
        by_weight(weight, 4, generator(0))


def test_the_prompt_nearest_to_the_proficiency_is_chosen():
    """Neither the easiest nor the hardest; of two equally near the first."""
    score = torch.tensor([0.1, 0.9, 0.45, 0.55, 0.3])
    assert (
        nearest_to_proficiency(score, torch.tensor(0.4)) == 2 and nearest_to_proficiency(score, torch.tensor(5.0)) == 1
    )
    assert nearest_to_proficiency(torch.tensor([2.0, 1.0, 1.0]), torch.tensor(1.5)) == 0
    for target in (0.0, 0.33, 0.8):
        chosen = nearest_to_proficiency(score, torch.tensor(target))
        assert (score[chosen] - target).abs() == (score - target).abs().min()
