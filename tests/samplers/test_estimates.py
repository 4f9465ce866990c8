"""samplers/estimates.py: where states on the way would end."""

import pytest
import torch

from samplers import estimates


def draws(count=3):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 2, generator=generator, dtype=torch.float64) for _ in range(count)]


def test_a_clean_estimate_in_one_step_is_that_of_the_velocity():
    """Tweedie: rows at their own levels; a finished row stays as it is."""
    latents, v, _ = draws()
    sigma = torch.tensor([0.9, 0.5, 0.1, 0.0], dtype=torch.float64)
    ours = estimates.clean_estimate(latents, sigma, torch.zeros(4, dtype=torch.long), lambda x, s, p: v, substeps=1)
    ours, level = ours
    assert not level.any()
    torch.testing.assert_close(ours, latents - sigma[:, None] * v)
    assert torch.equal(ours[3], latents[3])


def test_more_substeps_come_nearer_to_where_the_ode_ends():
    """Data N(2, .5^2): the map from any level to the data is known."""
    sigma, prompt = torch.tensor([1.0, 0.9, 0.6, 0.3], dtype=torch.float64), torch.zeros(4, dtype=torch.long)
    z = draws()[0][:, :1]
    spread = ((1 - sigma) ** 2 * 0.25 + sigma**2).sqrt()[:, None]
    latents, clean = (1 - sigma[:, None]) * 2 + spread * z, 2 + 0.5 * z
    seen = []

    def velocity(x, level, prompt):
        seen.append(level)
        level = level[:, None]
        pull = (x - (1 - level) * 2) / ((1 - level) ** 2 * 0.25 + level**2)
        return (level - (1 - level) * 0.25) * pull - 2

    found = (estimates.clean_estimate(latents, sigma, prompt, velocity, substeps=n)[0] for n in (1, 5, 500))
    far, near, exact = ((x - clean).abs().max() for x in found)
    assert exact < 0.02 < near < far and len(seen) == 506
    with pytest.raises(ValueError, match="in 0 substeps"):
        estimates.clean_estimate(latents, sigma, prompt, velocity, substeps=0)
