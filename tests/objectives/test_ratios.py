"""flowrl/objectives/ratios.py: importance ratios."""

import torch

from flowrl.objectives import ratios


def test_the_ratio_is_the_quotient_of_the_densities():
    log_prob, old = torch.tensor([[0.3, -1.0]]), torch.tensor([[0.1, -0.5]])
    torch.testing.assert_close(ratios.per_decision(log_prob, old), log_prob.exp() / old.exp())


def test_the_ratio_carries_the_gradient_of_the_log_prob_also_where_it_is_1():
    """C24: a ratio of exactly 1 still teaches."""
    log_prob = torch.tensor([[0.3, -1.0]], requires_grad=True)
    ratio = ratios.per_decision(log_prob, log_prob.detach())
    ratio.sum().backward()
    assert torch.equal(ratio, torch.ones(1, 2)) and torch.equal(log_prob.grad, torch.ones(1, 2))
