"""rewards/preferences.py: what a reward model is trained by."""

import math

import torch

from rewards.preferences import bradley_terry


def test_a_pair_of_equal_scores_costs_ln_2_and_is_pulled_apart():
    winner, loser = (torch.tensor([0.3, -40.0, 500.0], requires_grad=True) for _ in range(2))
    loss = bradley_terry(winner, loser)
    torch.testing.assert_close(loss, torch.full((3,), math.log(2)))
    loss.sum().backward()
    assert winner.grad.tolist() == [-0.5] * 3 and loser.grad.tolist() == [0.5] * 3


def test_a_pair_costs_minus_the_log_of_the_chance_that_its_winner_is_preferred():
    """Scores 1 and 0: e / (e + 1); far apart it costs nothing or their distance, and stays finite."""
    ours = bradley_terry(torch.tensor([1.0, 300.0, -300.0]), torch.zeros(3))
    torch.testing.assert_close(ours, torch.tensor([-math.log(math.e / (math.e + 1)), 0.0, 300.0]))
