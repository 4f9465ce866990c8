"""samplers/noise.py: how the noise of siblings relates."""

import pytest
import torch

from samplers import noise


def draws(children, parents=40_000):
    generator = torch.Generator().manual_seed(0)
    own, shared = (torch.randn(parents, n, 1, generator=generator) for n in (children, 1))
    return own, shared


@pytest.mark.parametrize("strength", [0.0, 1.0, 4.0])
def test_correlated_siblings_keep_unit_variance_and_the_promised_correlation(strength):
    own, shared = draws(3)
    out = noise.correlated(own, shared, strength=strength)[..., 0]
    assert out.std(0) == pytest.approx(torch.ones(3), abs=0.015)
    expected = 1 / (1 + strength**2)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert torch.corrcoef(out[:, [a, b]].T)[0, 1].item() == pytest.approx(expected, abs=0.015)


def test_correlated_noise_is_independent_between_forking_states():
    own, shared = draws(2)
    out = noise.correlated(own, shared, strength=1.0)[:, 0, 0]
    assert abs(torch.corrcoef(torch.stack([out[:-1], out[1:]]))[0, 1].item()) < 0.015


def test_independent_siblings_keep_their_own_noise():
    own, _ = draws(3, parents=5)
    assert torch.equal(noise.independent(own), own)


def test_scaled_noise_is_what_the_published_branches_draw():
    """Sixteen times the variance: not the density that is trained."""
    own, _ = draws(2)
    assert noise.scaled(own).std() == pytest.approx(4, abs=0.03)
