"""samplers/solvers.py: DPM-Solver++ on flows."""

from itertools import pairwise

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler

from samplers import kernels, schedules, solvers


def draws(count=3):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 2, generator=generator, dtype=torch.float64) for _ in range(count)]


def test_the_first_order_update_is_the_euler_step():
    latents, velocity, _ = draws()
    sigma, sigma_next = torch.tensor(0.8, dtype=torch.float64), torch.tensor(0.6, dtype=torch.float64)
    for end in (sigma_next, sigma_next * 0):
        ours = solvers.first_order(latents, latents - sigma * velocity, sigma, end)
        torch.testing.assert_close(ours, kernels.ode(latents, velocity, sigma, end)[0], atol=1e-14, rtol=0)


def test_the_second_order_update_is_the_first_order_one_after_pure_noise():
    """At sigma 1 the previous point is infinitely far; nothing becomes nan."""
    latents, now, before = draws()
    levels = torch.tensor([1.0, 0.8, 0.6], dtype=torch.float64)
    ours = solvers.second_order(latents, now, before, *levels)
    assert torch.equal(ours, solvers.first_order(latents, now, levels[1], levels[2]))


def test_the_second_order_update_is_the_first_order_one_where_the_estimate_stands_still():
    latents, now, _ = draws()
    levels = torch.tensor([0.9, 0.8, 0.6], dtype=torch.float64)
    ours = solvers.second_order(latents, now, now, *levels)
    assert torch.equal(ours, solvers.first_order(latents, now, levels[1], levels[2]))


def gaussian(latents, sigma, prompt):
    """The exact velocity of N(2, 0.5^2); its ODE carries x to 2 + 0.5 x."""
    sigma = sigma[:, None]
    pull = (latents - (1 - sigma) * 2) / ((1 - sigma) ** 2 * 0.25 + sigma**2)
    return (sigma - (1 - sigma) * 0.25) * pull - 2


def test_the_solver_converges_faster_than_euler_on_a_gaussian():
    """Twenty calls of either; the exact flow is known."""
    latents, prompt, sigmas = draws(1)[0].float(), torch.zeros(4, dtype=torch.long), schedules.linear(20)
    ours, euler = solvers.dpm_solver(gaussian, latents, prompt, sigmas), latents
    for t in range(20):
        euler = kernels.ode(euler, gaussian(euler, sigmas[t].expand(4), prompt), sigmas[t], sigmas[t + 1])[0]
    exact = 2 + 0.5 * latents
    assert (ours - exact).abs().max() < 0.5 * (euler - exact).abs().max()


def test_the_solver_calls_the_network_once_per_step_down_to_a_single_one():
    for steps in (1, 2, 5):
        seen = []

        def counted(latents, sigma, prompt, seen=seen):
            seen.append(sigma)
            return gaussian(latents, sigma, prompt)

        latents, prompt = torch.ones(3, 2), torch.zeros(3, dtype=torch.long)
        out = solvers.dpm_solver(counted, latents, prompt, schedules.linear(steps))
        assert len(seen) == steps and bool(out.isfinite().all())
        assert torch.equal(torch.stack([s[0] for s in seen]), schedules.linear(steps)[:-1])


@pytest.mark.parametrize("steps", [2, 5, 10, 20])
def test_the_solver_is_diffusers_dpm_solver_on_flow_sigmas(steps):
    """Same sigmas, same network: the multistep scheduler of diffusers (order 2, midpoint) ends at the same latents."""
    scheduler = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, algorithm_type="dpmsolver++"
    )
    scheduler.set_timesteps(steps)
    prompt = torch.arange(4)

    def velocity(latents, sigma, prompt):
        return torch.tanh(latents) + sigma[:, None] * prompt[:, None]

    start = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    theirs = start
    for timestep, sigma in zip(scheduler.timesteps, scheduler.sigmas, strict=False):
        theirs = scheduler.step(velocity(theirs, sigma.expand(4), prompt), timestep, theirs).prev_sample
    ours = solvers.dpm_solver(velocity, start, prompt, scheduler.sigmas)
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)
    if steps > 2:  # and it is not merely Euler
        euler = start
        for sigma, after in pairwise(scheduler.sigmas):
            euler = euler + (after - sigma) * velocity(euler, sigma.expand(4), prompt)
        assert (ours - euler).abs().max() > 1e-3
