"""flowrl/objectives/penalties.py: terms that hold the policy back."""

import pytest
import torch

from flowrl.objectives import penalties


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


MEAN, OTHER = draw(3, 2, 4), draw(3, 2, 4, seed=1)
STD, SIGMA, SIGMA_NEXT = (
    draw(3, 2, seed=2).abs() + 0.1,
    torch.full((3, 2), 0.7).double(),
    torch.full((3, 2), 0.4).double(),
)


def test_the_gaussian_kl_is_torchs_per_latent_dim():
    own, other = (torch.distributions.Normal(mean, STD[..., None]) for mean in (MEAN, OTHER))
    expected = torch.distributions.kl_divergence(own, other).mean(2)
    torch.testing.assert_close(penalties.kl_gaussian(MEAN, OTHER, STD), expected)


def test_the_two_kls_differ_by_the_size_of_the_step():
    """C57: a coefficient tuned for one is wrong for the other, by |dt| and by nothing else."""
    over_s2 = penalties.kl_mean_over_s2(MEAN, OTHER, STD, SIGMA, SIGMA_NEXT)
    torch.testing.assert_close(over_s2, penalties.kl_gaussian(MEAN, OTHER, STD) * 0.3, rtol=1e-6, atol=0)


@pytest.mark.parametrize("penalty", [penalties.mean_mse, penalties.velocity_mse], ids=lambda f: f.__name__)
def test_a_squared_distance_is_the_mean_over_the_latent_dims(penalty):
    """C57: mean((v - v_ref)^2)."""
    torch.testing.assert_close(penalty(MEAN, OTHER), (MEAN - OTHER).square().mean(2))


def test_a_penalty_pulls_towards_the_reference():
    """C57: the term has a gradient, and it points away from the reference."""
    mean = MEAN.clone().requires_grad_()
    penalties.kl_gaussian(mean, OTHER, STD).sum().backward()
    torch.testing.assert_close(mean.grad, (MEAN - OTHER) / STD[..., None] ** 2 / 4)


def test_the_moving_anchor_is_the_gaussian_kl_times_its_coefficient():
    coefficient = torch.tensor(1e-3).double()
    ours = penalties.kl_anchor_adaptive(MEAN, OTHER, STD, coefficient)
    torch.testing.assert_close(ours, 1e-3 * penalties.kl_gaussian(MEAN, OTHER, STD), rtol=1e-3, atol=0)
    expected = 1e-3 * (MEAN - OTHER).square().mean(2) / (2 * (STD**2 + 1e-6))
    torch.testing.assert_close(ours, expected)
    assert penalties.kl_anchor_adaptive(MEAN, OTHER, STD * 0, coefficient).isfinite().all()


def test_the_stepwise_term_pays_for_a_log_prob_that_falls():
    log_prob, old = torch.tensor([[0.1, 0.5]]), torch.tensor([[0.3, 0.2]])
    torch.testing.assert_close(
        penalties.log_prob_drop_adaptive(log_prob, old, torch.tensor(2.0)), torch.tensor([[0.4, -0.6]])
    )


def test_the_best_path_is_imitated_as_much_as_it_is_better():
    """Nothing where there is no best one, and no pull on the best path itself."""
    better = torch.tensor([[0.0, 2.0], [-torch.inf, 1.0], [0.5, 0.5]]).double()
    velocity = MEAN.clone().requires_grad_()
    ours = penalties.best_path_mse(velocity, OTHER, better)
    torch.testing.assert_close(ours, better.sigmoid() * (MEAN - OTHER).square().mean(2))
    ours.sum().backward()
    assert ours[1, 0] == 0 and not velocity.grad[1, 0].any() and bool(velocity.grad.isfinite().all())
    assert not penalties.best_path_mse(MEAN, MEAN, better).any()
