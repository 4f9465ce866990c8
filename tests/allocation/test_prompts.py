"""flowrl/allocation/prompts.py: which prompts an update trains on."""

from flowrl.allocation.prompts import shuffled
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
