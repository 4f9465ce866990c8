"""samplers/candidates.py: which of several candidates is walked on from."""

import torch

from flowrl.randomness import generator
from samplers import candidates

SCORE = torch.tensor([[0.1, 0.9, 0.9], [0.5, -2.0, 0.4]])


def test_the_best_candidate_is_the_first_of_the_highest():
    assert candidates.best_one(SCORE).tolist() == [1, 0]
    assert candidates.best_one(torch.full((2, 1), 0.3)).tolist() == [0, 0]


def test_a_random_candidate_may_be_any_and_is_named_by_its_generator():
    drawn = torch.stack([candidates.random_one(SCORE, generator(0, i)) for i in range(60)])
    assert all(set(column.tolist()) == {0, 1, 2} for column in drawn.T)
    assert torch.equal(candidates.random_one(SCORE, generator(5)), candidates.random_one(SCORE, generator(5)))
