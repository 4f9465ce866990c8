"""flowrl/objectives/ratios.py: importance ratios."""

import pytest
import torch

from flowrl.objectives import clipped, penalties, ratios
from samplers import density


def test_the_ratio_is_the_quotient_of_the_densities():
    log_prob, old = torch.tensor([[0.3, -1.0]]), torch.tensor([[0.1, -0.5]])
    torch.testing.assert_close(ratios.per_decision(log_prob, old), log_prob.exp() / old.exp())


def test_the_ratio_carries_the_gradient_of_the_log_prob_also_where_it_is_1():
    """C24: a ratio of exactly 1 still teaches."""
    log_prob = torch.tensor([[0.3, -1.0]], requires_grad=True)
    ratio = ratios.per_decision(log_prob, log_prob.detach())
    ratio.sum().backward()
    assert torch.equal(ratio, torch.ones(1, 2)) and torch.equal(log_prob.grad, torch.ones(1, 2))


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_rows_ratio_is_the_geometric_mean_of_its_decisions():
    log_prob, old, mask = draw(3, 4), draw(3, 4, seed=1), torch.ones(3, 4).double()
    ours, each = ratios.per_row(log_prob, old, mask), ratios.per_decision(log_prob, old)
    torch.testing.assert_close(ours, each.prod(1, keepdim=True).pow(1 / 4).expand(3, 4))


def test_rows_of_one_decision_have_its_ratio():
    """Chunk-GRPO with chunks of length 1 is Flow-GRPO."""
    log_prob, old = draw(6, 1), draw(6, 1, seed=1)
    ours = ratios.per_row(log_prob, old, torch.ones(6, 1).double())
    torch.testing.assert_close(ours, ratios.per_decision(log_prob, old))


def test_decisions_outside_of_a_row_have_no_part_in_its_ratio():
    """Chunks of 2 and 3 side by side; what is absent may be nan."""
    log_prob, old = draw(2, 3), draw(2, 3, seed=1)
    mask = torch.tensor([[1.0, 1, 0], [1, 1, 1]]).double()
    log_prob[0, 2] = torch.nan
    log_prob.requires_grad_()
    ours = ratios.per_row(log_prob, old, mask)
    torch.testing.assert_close(ours[0, 0], (log_prob - old)[0, :2].mean().exp())
    (ours * mask).sum().backward()
    assert log_prob.grad[0, 2] == 0 and bool(log_prob.grad.isfinite().all())


def test_the_gradient_of_a_rows_ratio_is_the_mean_of_its_log_probs_gradients():
    log_prob = draw(2, 4).requires_grad_()
    ratio = ratios.per_row(log_prob, log_prob.detach(), torch.ones(2, 4).double())
    (grad,) = torch.autograd.grad(ratio[:, 0].sum(), log_prob)
    assert torch.equal(ratio, torch.ones(2, 4).double())
    torch.testing.assert_close(grad, torch.full((2, 4), 0.25).double())


def test_chunks_teach_on_the_first_update_what_single_steps_teach_and_then_no_longer():
    """On-policy the gradients are equal; off-policy they differ."""
    advantage, weight, mask = (
        draw(2, 1, seed=4).expand(2, 4),
        torch.full((2, 4), 1 / 8).double(),
        torch.ones(2, 4).double(),
    )
    for moved, same in ((0.0, True), (0.3, False)):
        log_prob, found = draw(2, 4).requires_grad_(), []
        old = log_prob.detach() + moved * draw(2, 4, seed=2)
        for ratio in (ratios.per_row(log_prob, old, mask), ratios.per_decision(log_prob, old)):
            loss = (weight * clipped.ppo_clip(ratio, advantage)).sum()
            found.append(torch.autograd.grad(loss, log_prob)[0])
        assert torch.allclose(*found, atol=1e-12) is same


def guarded_case(rows=5, dims=64):
    """Old and new means of a step, what was drawn by the old one, and its noise."""
    noise, old, std = draw(rows, 1, dims), draw(rows, 1, dims, seed=1), draw(rows, 1, seed=2).abs() + 0.3
    mean = old + 0.05 * draw(rows, 1, dims, seed=3)
    drawn = old + std[..., None] * noise
    log_prob, log_prob_old = (density.gaussian(drawn[:, 0], m[:, 0], std[:, 0])[:, None] for m in (mean, old))
    return log_prob, log_prob_old, mean, old, std, noise


def test_a_guarded_log_ratio_is_the_noise_times_the_shift():
    log_prob, log_prob_old, mean, old, std, noise = guarded_case()
    ours = ratios.guarded(log_prob, log_prob_old, mean, old, std).log()
    torch.testing.assert_close(ours, (noise * (mean - old)).mean(2), atol=1e-12, rtol=0)


def test_guarding_takes_the_bias_out_of_the_log_ratio():
    """E[log ratio] = -KL < 0 without it; 0 with it."""
    log_prob, log_prob_old, mean, old, std, _ = guarded_case(rows=4000, dims=16)
    plain = (log_prob - log_prob_old) * std
    ours = ratios.guarded(log_prob, log_prob_old, mean, old, std).log()
    error = ours.std() / 4000**0.5
    assert ours.mean().abs() < 4 * error and plain.mean() < -4 * error


def test_the_guard_gives_the_hand_worked_numbers():
    """Means .1 .2 .3 .4 and .1 .25 .2 .4, std 1.4 sqrt(.1), noise .5 -1 .2 .3."""
    mean = torch.tensor([0.1, 0.2, 0.3, 0.4]).double()[None, None]
    old = torch.tensor([0.1, 0.25, 0.2, 0.4]).double()[None, None]
    noise, std = torch.tensor([0.5, -1, 0.2, 0.3]).double(), torch.tensor([[1.4 * 0.1**0.5]]).double()
    drawn = (old + std * noise)[0]
    log_prob, log_prob_old = (density.gaussian(drawn, m[0], std[0])[None] for m in (mean, old))
    assert (log_prob - log_prob_old).item() == pytest.approx(0.0315565, abs=6e-8)
    assert penalties.kl_gaussian(mean, old, std).item() == pytest.approx(0.00797194, abs=6e-9)
    guarded = ratios.guarded(log_prob, log_prob_old, mean, old, std).log().item()
    assert guarded == pytest.approx(0.0175) == pytest.approx((noise * (mean - old)).mean().item())
