"""flowrl/allocation/budgets.py: how many rollouts a prompt gets."""

import pytest
import torch

from flowrl.allocation.budgets import by_expected, by_uncertainty, uncertainty
from flowrl.memory import trackers
from flowrl.randomness import generator


def test_a_prompt_is_least_certain_where_half_is_expected():
    expected = torch.linspace(0.01, 0.99, 99)
    ours = uncertainty(expected)
    assert ours.argmax() == 49 and ours.max() == pytest.approx(0.5, abs=1e-5)
    torch.testing.assert_close(ours, ours.flip(0))


def test_a_less_certain_prompt_gets_a_bigger_group():
    sizes = by_uncertainty(torch.tensor([0.0, 0.1, 0.13, 0.26, 0.4, 0.5, 0.6]))
    assert sizes.tolist() == [21, 21, 22, 23, 24, 24, 24]
    assert len(by_uncertainty(torch.full((9,), 0.3)).unique()) == 1
    assert by_uncertainty(torch.tensor([0.1, 0.4]), sizes=[8]).tolist() == [8, 8]


@pytest.mark.parametrize("sizes", [(), (1, 4)])
def test_sizes_without_a_group_are_refused(sizes):
    with pytest.raises(ValueError, match="expected one or more, each of 2 or more"):
        by_uncertainty(torch.tensor([0.2]), sizes=sizes)


def remembered(scored, updates):
    """The memory of a run that scored prompts 0, 1, ... so in every update."""
    memory, reward = {}, torch.tensor(scored)[:, None]
    for _ in range(updates):
        _, memory = trackers.beta_counts(reward, torch.ones(1), torch.arange(len(scored)), memory)
    return memory


def test_prompts_of_which_nothing_is_known_get_the_largest_groups():
    """In a first update all are equally uncertain: .5 is expected of each."""
    assert by_expected(9, 5, 24, generator(0), {})[1] == [24] * 5


def test_settled_prompts_are_drawn_less_often_and_get_the_smallest_groups():
    """Two are always right and one never; the fourth scores 1/2: uncertainties 0, 0, 0 and .5, but for what forgets."""
    memory = remembered([1.0, 1.0, 0.0, 0.5], 80)
    weight = uncertainty(trackers.expected_reward(torch.arange(4), memory))
    drawn = [by_expected(4, 1, 24, generator(0, i), memory) for i in range(400)]
    assert {chosen[0]: roots[0] for chosen, roots in drawn} == {0: 21, 1: 21, 2: 21, 3: 24}
    share = sum(chosen == [3] for chosen, _ in drawn) / 400
    assert share == pytest.approx(float(weight[3] / weight.sum()), abs=0.05) and share > 0.9


def test_bins_of_one_size_give_every_prompt_the_same_group():
    memory = remembered([1.0, 0.6, 0.0, 0.5], 5)
    assert by_expected(4, 4, 24, generator(0), memory, fewer=(0,))[1] == [24] * 4
