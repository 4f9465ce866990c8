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
