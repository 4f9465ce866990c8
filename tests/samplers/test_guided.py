"""samplers/guided.py: a reward chooses among draws at every step."""

import pytest
import torch

from flowrl.part import part
from flowrl.randomness import generator
from samplers import kernels, schedules
from samplers.guided import guided

FLOW = part(kernels.flow_sde, eta=0.7).bound


def velocity(latents, sigma, prompt):
    """Of data N(2, .5^2) in every dim."""
    level = sigma[:, None]
    pull = (latents - (1 - level) * 2) / ((1 - level) ** 2 * 0.25 + level**2)
    return (level - (1 - level) * 0.25) * pull - 2


def walk(count, score=lambda x, sigma: x.sum(1), rows=400, steps=8, calls=None, ahead=True):
    def counted(latents, sigma, prompt):
        if calls is not None:
            calls.append(len(latents))
        return velocity(latents, sigma, prompt)

    start = torch.randn(rows, 2, generator=torch.Generator().manual_seed(0))
    named = [generator(0, i) for i in range(rows)]
    prompt = torch.zeros(rows, dtype=torch.long)
    known = {"count": count, "generators": named, "ahead": ahead}
    return guided(counted, start, prompt, schedules.linear(steps), FLOW, score, **known)


def test_more_candidates_reach_a_higher_reward():
    """An oracle reward, the sum of the coordinates: 4 without guidance, and monotone in the number of draws."""
    found = [walk(count).sum(1).mean().item() for count in (1, 2, 4, 8)]
    assert found[0] == pytest.approx(4, abs=0.2) and found == sorted(found) and found[-1] > found[0] + 1


def test_one_candidate_is_the_plain_stochastic_sampler():
    """And what the reward says does not matter."""
    plain, other = walk(1), walk(1, score=lambda x, sigma: -x.sum(1))
    assert torch.equal(plain, other)
    x, sigmas = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))[:1], schedules.linear(8)
    named = generator(0, 0)
    for t in range(8):
        at = (sigmas[t][None], sigmas[t + 1][None])
        step = kernels.bind(FLOW, sigmas=sigmas) if t < 7 else kernels.ode
        mean, std = step(x, velocity(x, at[0], None), *at)
        x = mean + (std * torch.randn(1, 2, generator=named) if t < 7 else 0)
    torch.testing.assert_close(plain[:1], x, atol=1e-5, rtol=0)


def test_every_draw_is_seen_by_the_network_once():
    calls = []
    walk(3, rows=5, steps=4, calls=calls)
    assert calls == [5, 15, 15, 15]


def test_a_reward_on_noisy_draws_needs_the_network_for_the_chosen_alone():
    """It is told their level, and its choice raises the reward as that by estimates does."""
    calls, levels = [], []

    def score(latents, sigma):
        levels.append(sigma.unique().item())
        return latents.sum(1)

    found = walk(3, score, rows=400, steps=4, calls=calls, ahead=False)
    assert calls == [400] * 4 and levels == [0.75, 0.5, 0.25]
    assert found.sum(1).mean() > walk(1, steps=4).sum(1).mean() + 0.5
