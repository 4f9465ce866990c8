"""samplers/density.py: the log-density of a step, per latent dimension."""

import torch

from samplers import density


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_log_prob_is_the_mean_of_the_normal_density_over_the_latent_dims():
    next_latents, mean, std = draw(5, 3, 4), draw(5, 3, 4, seed=1), draw(5, seed=2).abs() + 0.1
    expected = torch.distributions.Normal(mean, std[:, None, None]).log_prob(next_latents).flatten(1).mean(1)
    torch.testing.assert_close(density.gaussian(next_latents, mean, std), expected)


def test_one_std_for_all_rows_is_the_same_as_one_per_row():
    next_latents, mean, std = draw(5, 2), draw(5, 2, seed=1), torch.tensor(0.3)
    assert torch.equal(density.gaussian(next_latents, mean, std), density.gaussian(next_latents, mean, std.expand(5)))


def test_the_layout_of_the_latent_dims_does_not_matter():
    next_latents, mean, std = draw(2, 24), draw(2, 24, seed=1), torch.tensor([0.2, 0.4])
    for shape in ((24,), (2, 12), (2, 3, 4), (2, 3, 2, 2)):
        ours = density.gaussian(next_latents.reshape(2, *shape), mean.reshape(2, *shape), std)
        torch.testing.assert_close(ours, density.gaussian(next_latents, mean, std))


def test_a_squared_error_is_finite_at_the_mean_and_negative_elsewhere():
    mean = draw(3, 2)
    assert torch.equal(density.squared_error(mean, mean), torch.zeros(3))
    torch.testing.assert_close(density.squared_error(mean + 0.5, mean), torch.full((3,), -0.25))


def test_a_bump_of_one_percent_on_65536_dims_stays_finite():
    """C29: a sum over the dims would overflow the ratio; the mean has E[ratio] < 1 and a gradient."""
    mean = draw(2, 65536)
    next_latents = mean + 0.1 * draw(2, 65536, seed=1)
    moved = (mean + 1e-2 * draw(2, 65536, seed=2)).requires_grad_()
    std = torch.tensor([0.1, 0.1])
    ratio = (density.gaussian(next_latents, moved, std) - density.gaussian(next_latents, mean, std)).exp()
    ratio.sum().backward()
    assert bool(ratio.isfinite().all()) and bool((ratio < 1).all()) and bool(moved.grad.isfinite().all())
    torch.testing.assert_close(ratio.detach().log(), torch.full((2,), -(0.1**2) / 2), atol=1.5e-3, rtol=0)


def test_the_constant_of_the_density_cancels_in_a_ratio():
    next_latents, mean, other, std = draw(4, 6), draw(4, 6, seed=1), draw(4, 6, seed=2), torch.tensor(0.7)
    whole = density.gaussian(next_latents, mean, std) - density.gaussian(next_latents, other, std)
    square = density.squared_error(next_latents, mean) - density.squared_error(next_latents, other)
    torch.testing.assert_close(whole, square / (2 * std**2), atol=1e-5, rtol=1e-5)
