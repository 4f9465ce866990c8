"""flowrl/objectives/elbos.py: errors of the velocity in the place of log-probs."""

import pytest
import torch

from flowrl.objectives import elbos

TARGET, VELOCITY = [0.3, 0.1], [0.2, -0.1]


def rows(velocity=VELOCITY, target=TARGET, sigma=0.5):
    """One row whose target velocity, noise - x0, is the given one."""
    x0 = torch.tensor([0.7, -0.4], dtype=torch.float64)
    noise = x0 + torch.tensor(target, dtype=torch.float64)
    as_rows = [x.view(1, 1, 2) for x in (torch.tensor(velocity, dtype=torch.float64), x0, noise)]
    return [*as_rows, torch.full((1, 1), sigma, dtype=torch.float64)]


@pytest.mark.parametrize(
    ("elbo", "numbers", "expected"),
    [
        (elbos.weighted, {"power": 0.0}, -0.025),
        (elbos.weighted, {"power": 1.0}, -0.0125),
        (elbos.weighted, {"power": 2.0}, -0.00625),
        (elbos.huber, {}, -0.07905194),
        (elbos.generalized_huber, {"power": 0.25}, -0.78894617),
    ],
)
def test_the_golden_log_probs_of_awm(elbo, numbers, expected):
    """v = [.2, -.1], target [.3, .1], t = .5: error .025."""
    assert elbo(*rows(), **numbers).item() == pytest.approx(expected, abs=5e-9)


@pytest.mark.parametrize("factor", [0.1, 3.0, 40.0])
def test_a_self_normalised_error_scales_like_the_residual(factor):
    """V-GRPO: a residual times c multiplies the value by c, not by c^2."""
    once = elbos.self_normalised(*rows([0.0, 0.0], TARGET))
    scaled = elbos.self_normalised(*rows([0.0, 0.0], [factor * x for x in TARGET]))
    torch.testing.assert_close(scaled, factor * once)


def test_the_scale_of_a_self_normalised_error_carries_no_gradient():
    """d/dv of mean(e^2) / sg(mean|e|): 2 e / (2 dims) * t / mean|e| with e = t (v - target)."""
    velocity, x0, noise, sigma = rows()
    velocity.requires_grad_()
    elbos.self_normalised(velocity, x0, noise, sigma).sum().backward()
    error = 0.5 * (velocity.detach() - (noise - x0))
    torch.testing.assert_close(velocity.grad, -(2 * error / 2) * 0.5 / error.abs().mean())


@pytest.mark.menu("flowrl.objectives.elbos")
def test_an_exact_velocity_is_worth_0_and_any_other_less(public):
    exact, other = public(*rows(TARGET)), public(*rows())
    assert exact.item() == pytest.approx(0, abs=1e-12) and other.item() < -1e-3
