"""flowrl/objectives/score.py: the score function itself."""

import torch

from flowrl.objectives import clipped, ratios, score
from flowrl.part import part


def test_on_policy_every_surrogate_has_the_gradient_of_the_score_function():
    """TreeGRPO: the plain and the clipped form coincide on the first update."""
    advantage = torch.tensor([[0.4, -2.0], [1.0, 0.0]])
    log_prob = torch.tensor([[0.3, -1.0], [2.0, 0.1]], requires_grad=True)
    (plain,) = torch.autograd.grad(score.reinforce(log_prob, advantage).sum(), log_prob)
    assert torch.equal(plain, -advantage)
    for surrogate in (clipped.ppo_clip, clipped.unclipped, clipped.ppo_clip_by_outcome):
        ratio = ratios.per_decision(log_prob, log_prob.detach())
        (other,) = torch.autograd.grad(part(surrogate)(ratio=ratio, advantage=advantage).sum(), log_prob)
        torch.testing.assert_close(other, plain)
