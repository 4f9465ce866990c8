"""flowrl/visual/toy.py: a 2-D flow policy that learns in seconds."""

import pytest
import torch

from flowrl.visual.policy import Example
from flowrl.visual.toy import ToyPolicy
from samplers import rollout


def test_the_toy_starts_at_its_data(toy):
    """N(0, 0.7^2) for every prompt, by the ODE."""
    policy = toy()
    noise = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0))
    prompt = torch.arange(2000) % 4
    out = rollout(policy.velocity, noise, prompt, policy.sigmas(20)).leaves()
    assert out.mean().item() == pytest.approx(0, abs=0.1) and out.std().item() == pytest.approx(0.7, abs=0.1)


def test_rows_through_the_network_are_counted(toy):
    policy = toy()
    at = (torch.zeros(5, 2), torch.ones(5), torch.zeros(5, dtype=torch.long))
    policy.velocity(*at)
    with torch.no_grad():
        policy.velocity(*at)
    assert (policy.forwards, policy.backwards) == (10, 5)


def test_pictures_are_one_pixel_in_range_and_keep_the_precision(toy):
    for dtype in (torch.float32, torch.float64):
        policy = toy(dtype=dtype)
        latents = policy.noise(3, torch.Generator().manual_seed(0)) * 50
        pictures = policy.decode(latents)
        assert pictures.shape == (3, 3, 1, 1) and pictures.dtype == latents.dtype == dtype
        assert pictures.min() >= 0 and pictures.max() <= 1


def test_a_seed_names_a_policy():
    one, same, other = (ToyPolicy(hidden=8, seed=seed) for seed in (3, 3, 4))
    for (name, a), (_, b), (_, c) in zip(one.trainable(), same.trainable(), other.trainable(), strict=True):
        assert torch.equal(a, b) and not torch.equal(a, c), name


def test_prompts_are_numbers(toy):
    assert toy().encode([Example("2"), Example("0")]).tolist() == [2, 0]


def test_fitting_leaves_no_gradient_behind():
    assert all(parameter.grad is None for _, parameter in ToyPolicy(hidden=8).trainable())


def test_every_parameter_is_trainable_under_its_own_name(toy):
    names = [name for name, _ in toy().trainable()]
    assert len(names) == len(set(names)) == 7
