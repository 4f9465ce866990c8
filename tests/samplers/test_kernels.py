"""samplers/kernels.py: closed forms, limits and gradients."""

import math

import pytest
import torch
from diffusers import DDIMScheduler

from flowrl.part import part
from samplers import density, kernels, schedules
from samplers.kernels import bind

SDES = [
    kernels.flow_sde,
    kernels.dance_sde,
    kernels.linear_sde,
    kernels.cps,
    kernels.ddim,
    kernels.ddim_sde,
    kernels.sage,
]
NAMES = {"ids": lambda value: getattr(value, "__name__", str(value))}


def gaussian_velocity(x, sigma, mean, std):
    """The exact velocity of N(mean, std^2): E[noise - x0 | x]."""
    pull = (x - (1 - sigma) * mean) / ((1 - sigma) ** 2 * std**2 + sigma**2)
    return (sigma - (1 - sigma) * std**2) * pull - mean


def walk(kernel, sigmas, mean, std, particles, last_is_ode=False):
    """Mean and std of the particles after walking along `sigmas` under the exact velocity."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(particles, 1, generator=generator)
    kernel = bind(kernel, sigmas=sigmas)
    for t in range(len(sigmas) - 1):
        step = kernels.ode if last_is_ode and t == len(sigmas) - 2 else kernel
        moved, spread = step(x, gaussian_velocity(x, sigmas[t], mean, std), sigmas[t], sigmas[t + 1])
        x = moved + spread * torch.randn(x.shape, generator=generator)
    return x.mean().item(), x.std().item()


@pytest.mark.parametrize(
    "kernel",
    [kernels.ode, kernels.flow_sde, kernels.dance_sde, kernels.linear_sde, kernels.sage, kernels.ddim],
    **NAMES,
)
def test_a_kernel_carries_noise_to_the_data(kernel):
    """Data N(2, 0.5^2) has a closed-form velocity; 400 steps must land on that Gaussian."""
    mean, std = walk(kernel, schedules.linear(400), 2.0, 0.5, 20_000)
    assert mean == pytest.approx(2, abs=0.02) and std == pytest.approx(0.5, abs=0.02)


def test_cps_ends_at_the_spread_that_its_docstring_says():
    """Coefficients are kept, the marginal is not: .42 in place of .50, however many steps."""
    kernel = part(kernels.cps, eta=0.7).bound
    assert walk(kernel, schedules.linear(400), 2.0, 0.5, 20_000)[1] == pytest.approx(0.42, abs=0.01)
    assert "0.42" in kernels.cps.__doc__


@pytest.mark.parametrize(
    "kernel, few, more, many",
    [
        (part(kernels.ode), 0.2765, 0.3729, 0.3972),
        (part(kernels.flow_sde, eta=0.7), 0.3214, 0.3832, 0.3992),
        (part(kernels.dance_sde, eta=0.3), 0.2847, 0.3762, 0.3981),
        (part(kernels.cps, eta=0.8), 0.2415, 0.2977, 0.3180),
        (part(kernels.sage, eta=0.5), None, None, 0.4),
        (part(kernels.linear_sde), None, None, 0.4),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_ten_fifty_and_five_hundred_steps_leave_the_published_marginals(kernel, few, more, many):
    """Data N(1.5, 0.4^2), shift 3, last step deterministic; all but CPS within 1 % of the data in the end."""
    for steps, std in ((10, few), (50, more), (500, many)):
        sigmas = schedules.shifted(schedules.linear(steps), shift=3.0)
        mean, ours = walk(kernel.bound, sigmas, 1.5, 0.4, 40_000, last_is_ode=True)
        assert mean == pytest.approx(1.5, abs=0.02) and (std is None or ours == pytest.approx(std, rel=0.012))
    assert (abs(ours - 0.4) <= 0.004) == (kernel.name != "cps")


@pytest.mark.parametrize(
    "kernel, off",
    [
        (kernels.flow_sde, 0.076),
        (kernels.dance_sde, 0.023),
        (kernels.linear_sde, 0.023),
        (kernels.sage, 0.067),
        (kernels.cps, 0.169),
    ],
)
def test_a_step_from_noised_data_leaves_noised_data(kernel, off):
    """C40: variance (1-s)^2 .4^2 + s^2 within 10 % after any of fifty steps, but for CPS; in closed form."""
    worst = 0.0
    for shift in (1.0, 3.0):
        sigmas = schedules.shifted(schedules.linear(50), shift=shift).double()
        before = (1 - sigmas) ** 2 * 0.16 + sigmas**2
        for t in range(49):
            one, at = torch.ones(1, 1, dtype=torch.float64), (sigmas[t], sigmas[t + 1])
            slope, std = bind(kernel, sigmas=sigmas)(one, gaussian_velocity(one, sigmas[t], 0.0, 0.4), *at)
            worst = max(worst, abs(float((slope.square() * before[t] + std**2) / before[t + 1]) - 1))
    assert worst == pytest.approx(off, abs=1e-3)


def step_inputs(dtype=torch.float64, rows=5, dims=(3, 2)):
    generator = torch.Generator().manual_seed(1)
    latents, velocity = (torch.randn(rows, *dims, generator=generator).to(dtype) for _ in range(2))
    return latents, velocity, schedules.shifted(schedules.linear(10), shift=3.0).to(dtype)


@pytest.mark.parametrize("kernel", SDES, **NAMES)
def test_without_noise_every_kernel_is_the_ode(kernel):
    latents, velocity, sigmas = step_inputs()
    for t in range(10):
        at = (latents, velocity, sigmas[t], sigmas[t + 1])
        mean, std = bind(part(kernel, eta=0.0).bound, sigmas=sigmas)(*at)
        torch.testing.assert_close(mean, kernels.ode(*at)[0], atol=1e-12, rtol=0)
        assert std == 0


@pytest.mark.parametrize("kernel", SDES, **NAMES)
def test_a_kernel_approaches_the_ode_as_its_noise_vanishes(kernel):
    """Not only at exactly 0: the distance falls with eta^2."""
    latents, velocity, sigmas = step_inputs()
    at = (latents, velocity, sigmas[3], sigmas[4])
    far, near = (
        (bind(part(kernel, eta=eta).bound, sigmas=sigmas)(*at)[0] - kernels.ode(*at)[0]).abs().max()
        for eta in (1e-2, 1e-3)
    )
    assert 0 < near < far / 90


@pytest.mark.parametrize("kernel", [kernels.ode, *SDES], **NAMES)
def test_the_first_step_is_finite_on_every_schedule(kernel):
    """C28: T of 1, 2, 10, 28, shift of 1, 3, 12, and grids that start at 0.999999."""
    latents, velocity, _ = step_inputs(torch.float32)
    for steps in (1, 2, 10, 28):
        for shift in (1.0, 3.0, 12.0):
            for start in (1.0, 0.999999):
                sigmas = schedules.shifted(schedules.linear(steps), shift=shift).clamp(max=start)
                mean, std = bind(kernel, sigmas=sigmas)(latents, velocity, sigmas[0], sigmas[1])
                assert bool(mean.isfinite().all()) and bool(std.isfinite()) and std <= 1.1


def test_a_schedule_that_starts_just_below_1_takes_the_same_first_flow_step():
    """An equality test on sigma would let the diffusion grow to 700."""
    latents, velocity, sigmas = step_inputs()
    almost = sigmas.clone()
    almost[0] = 0.999999
    exact = kernels.flow_sde(latents, velocity, sigmas[0], sigmas[1], sigmas)
    near = kernels.flow_sde(latents, velocity, almost[0], almost[1], almost)
    torch.testing.assert_close(near, exact, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kernel", [kernels.ode, *SDES], **NAMES)
def test_a_level_per_row_is_the_same_as_one_level(kernel):
    latents, velocity, sigmas = step_inputs()
    bound = bind(kernel, sigmas=sigmas)
    for t in (0, 4, 9):
        mean, std = bound(latents, velocity, sigmas[t], sigmas[t + 1])
        mean_rows, std_rows = bound(latents, velocity, sigmas[t].expand(5), sigmas[t + 1].expand(5))
        assert torch.equal(mean, mean_rows) and torch.equal(std.expand(5), std_rows)


def test_rows_at_different_levels_do_not_mix():
    latents, velocity, sigmas = step_inputs()
    t = torch.tensor([0, 2, 4, 7, 9])
    for kernel in SDES:
        bound = bind(kernel, sigmas=sigmas)
        mean, std = bound(latents, velocity, sigmas[t], sigmas[t + 1])
        for row in range(5):
            one, one_std = bound(latents[[row]], velocity[[row]], sigmas[t[row]], sigmas[t[row] + 1])
            assert torch.equal(mean[[row]], one) and std[row] == one_std


@pytest.mark.parametrize("kernel", SDES, **NAMES)
def test_the_gradient_of_a_log_prob_is_the_closed_form(kernel):
    """d log_prob / d velocity = (x' - mean) / std^2 * d mean / d velocity / D, with D latent dims."""
    latents, velocity, sigmas = step_inputs()
    bound = bind(kernel, sigmas=sigmas)
    at = (sigmas[3], sigmas[4])
    velocity.requires_grad_()
    mean, std = bound(latents, velocity, *at)
    next_latents = (mean + std * torch.randn(mean.shape, generator=torch.Generator().manual_seed(2))).detach()
    density.gaussian(next_latents, mean, std).sum().backward()
    slope = bound(latents, velocity + 1, *at)[0] - mean  # the mean is linear in the velocity
    expected = (next_latents - mean) / std**2 * slope / latents[0].numel()
    torch.testing.assert_close(velocity.grad, expected.detach(), atol=1e-12, rtol=1e-9)


def test_the_slope_of_the_mean_is_the_published_one():
    """s .7 -> .6: cps of std .3 has -.1241, dance of eta .7 has -.1105."""
    x, zero = torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    at = (torch.tensor(0.7, dtype=torch.float64), torch.tensor(0.6, dtype=torch.float64))
    eta = math.asin(0.5) * 2 / math.pi
    assert kernels.cps(x, zero + 1, *at, eta=eta)[0].item() == pytest.approx(-0.1241, abs=5e-5)
    assert kernels.dance_sde(x, zero + 1, *at, eta=0.7)[0].item() == pytest.approx(-0.1105, abs=5e-5)


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_the_slope_of_sage_is_the_published_one():
    """s .7 -> .6, eta .7: -.1197."""
    _, slope = kernels.scales(part(kernels.sage, eta=0.7).bound, double(0.7, 0.6))
    assert slope.item() == pytest.approx(-0.1197, abs=5e-5)


GRID = schedules.shifted(schedules.linear(10), shift=3.0).double()


def test_sages_variances_are_the_published_ones():
    """Shift 3, T = 10, eta .5."""
    std, _ = kernels.scales(kernels.sage, GRID)
    expected = double(0.6103, 0.1815, 0.1094, 0.0795, 0.0626, 0.0511, 0.0419, 0.0333, 0.0233, 0.0094)
    torch.testing.assert_close(std**2, expected, atol=5e-5, rtol=0)


@pytest.mark.parametrize(("levels", "sage", "flow"), [((0.90, 0.85), 0.3555, 0.45), ((0.5, 0.45), 0.0453, 0.05)])
def test_sage_draws_less_than_flow_sde_from_the_same_step(levels, sage, flow):
    at = (double(0)[None], double(0)[None], *double(*levels))
    assert (kernels.sage(*at, eta=1.0)[1] ** 2).item() == pytest.approx(sage, abs=5.1e-5)
    assert (kernels.flow_sde(*at, double(1, 0.95), eta=1.0)[1] ** 2).item() == pytest.approx(flow, abs=5.1e-5)


def test_sage_tends_to_flow_sde_as_the_step_shrinks():
    x, sigma = double(0.3)[None], torch.tensor(0.8, dtype=torch.float64)
    for length, apart in ((1e-2, 3e-2), (1e-4, 3e-4)):
        (mean, std), (other, flow) = (
            part(k, eta=0.7).bound(x, x, sigma, sigma - length, *schedule)
            for k, schedule in ((kernels.sage, ()), (kernels.flow_sde, (double(1, 0.99),)))
        )
        assert 0 < 1 - (std / flow).item() < apart and (mean - other).abs().item() < length * apart


@pytest.mark.parametrize("steps", [20, 50, 500, 5000])
def test_sage_draws_noise_on_the_first_step_of_any_grid(steps):
    """Shift 7: from 43 steps on, the second level lies above the published guard, whose variance is negative there."""
    std, _ = kernels.scales(kernels.sage, schedules.shifted(schedules.linear(steps), shift=7.0))
    assert bool((std > 0).all()) and std[0] > 0.4


def test_sages_guard_is_the_published_one_where_that_has_a_variance():
    """Hunyuan's grid: 20 steps, shift 5."""
    sigma_next = schedules.shifted(schedules.linear(20), shift=5.0).double()[1]
    std, _ = kernels.scales(kernels.sage, torch.stack([torch.ones_like(sigma_next), sigma_next]))
    expected = 0.25 * (-(1 - sigma_next) + ((1 - sigma_next) / 3e-3).log())
    torch.testing.assert_close(std[0] ** 2, expected)


@pytest.mark.parametrize(
    "kernel", [kernels.flow_sde, kernels.sage, kernels.dance_sde, kernels.linear_sde, kernels.cps], **NAMES
)
def test_the_slope_of_a_step_is_what_autograd_says(kernel):
    latents, velocity, sigmas = step_inputs()
    std, slope = kernels.scales(kernel, sigmas)
    for t in range(10):
        v = velocity[:1].clone().requires_grad_()
        mean, ours = bind(kernel, sigmas=sigmas)(latents[:1], v, sigmas[t], sigmas[t + 1])
        mean.sum().backward()
        torch.testing.assert_close(v.grad, slope[t].expand(v.shape), atol=1e-12, rtol=1e-9)
        torch.testing.assert_close(ours, std[t])


def test_the_slope_is_the_closed_form_of_each_kernel():
    """SAGE dt - c^2 (1-s) / 2s; Dance dt (1 + eta^2 (1-s) / 2s)."""
    dt, odds = GRID.diff(), ((1 - GRID) / GRID)[:-1]
    std, slope = kernels.scales(kernels.sage, GRID)
    torch.testing.assert_close(slope, dt - 0.5 * std**2 * odds, atol=1e-12, rtol=0)
    _, slope = kernels.scales(part(kernels.dance_sde, eta=0.3).bound, GRID)
    torch.testing.assert_close(slope, dt * (1 + 0.045 * odds), atol=1e-12, rtol=0)


def test_the_noise_of_flow_grpo_on_wan_falls_with_the_level():
    """By hand: .8 * .6 * sqrt(.2) from .6 to .4 on a schedule whose second level is .8."""
    std, _ = kernels.scales(kernels.linear_sde, double(1, 0.8, 0.6, 0.4, 0))
    assert std[2].item() == pytest.approx(0.8 * 0.6 * 0.2**0.5) and std[0].item() == pytest.approx(0.8 * 0.2**0.5)


def test_ddim_draws_what_the_noise_to_signal_ratio_leaves():
    """From pure noise everything is drawn afresh; the last step draws nothing."""
    std, _ = kernels.scales(kernels.ddim, GRID)
    odds = GRID / (1 - GRID)
    torch.testing.assert_close(std[0], GRID[1])
    torch.testing.assert_close(std[1:] ** 2, GRID[2:] ** 2 * (1 - (odds[2:] / odds[1:-1]) ** 2), atol=1e-12, rtol=0)
    assert std[-1] == 0


@pytest.mark.parametrize("to_one", [False, True], ids=["ends at the first alpha", "ends at alpha 1"])
@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_ddim_is_diffusers_step_down_to_the_last(eta, to_one):
    """Stable Diffusion's betas, ten steps; latents are divided by sqrt(a) + sqrt(1 - a) on either side."""
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "clip_sample": False}
    scheduler = DDIMScheduler(**betas, set_alpha_to_one=to_one, steps_offset=1)
    scheduler.set_timesteps(10)
    at = [*scheduler.alphas_cumprod[scheduler.timesteps], scheduler.final_alpha_cumprod]
    scale = [a.sqrt() + (1 - a).sqrt() for a in at]
    latents, noise, _ = step_inputs(torch.float32)
    drawn = torch.randn(latents.shape, generator=torch.Generator().manual_seed(2))
    for i, t in enumerate(scheduler.timesteps):
        theirs = scheduler.step(noise, t, latents, eta=eta, variance_noise=drawn).prev_sample
        x0 = (latents - (1 - at[i]).sqrt() * noise) / at[i].sqrt()
        levels = [(1 - at[j]).sqrt() / scale[j] for j in (i, i + 1)]
        mean, std = kernels.ddim(latents / scale[i], noise - x0, *levels, eta=eta)
        torch.testing.assert_close((mean + std * drawn) * scale[i + 1], theirs, atol=5e-6, rtol=5e-6)
    assert (std == 0) == (to_one or eta == 0)


def test_ddim_sde_is_noisiest_at_the_start_and_its_literal_form_silent_there():
    std, _ = kernels.scales(part(kernels.ddim_sde, eta=1.0).bound, GRID)
    literal, _ = kernels.scales(part(kernels.ddim_sde, eta=1.0, literal=True).bound, GRID)
    torch.testing.assert_close(std, GRID[1:] * GRID[:-1].sqrt())
    assert std.argmax() == 0 and bool((std <= GRID[1:]).all()) and literal[0] == 0
    torch.testing.assert_close(literal, GRID[1:] * (1 - GRID[:-1]).sqrt())


def test_growing_noise_is_flow_sde_of_the_etas_of_each_depth():
    """eta .7 (1 + depth / 8) at the four depths, in the mean too; without growth it is flow_sde."""
    latents, velocity, sigmas = step_inputs()
    at = (latents, velocity, sigmas[2], sigmas[3], sigmas)
    for depth in range(4):
        ours = kernels.growing_sde(*at, torch.tensor(depth))
        theirs = kernels.flow_sde(*at, eta=0.7 * (1 + depth / 8))
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(kernels.growing_sde(*at, torch.tensor(depth), growth=0.0), kernels.flow_sde(*at))
    per_row = (latents[:4], velocity[:4], sigmas[[2] * 4], sigmas[[3] * 4], sigmas, torch.arange(4))
    assert kernels.growing_sde(*per_row)[1].diff().min() > 0


@pytest.mark.parametrize("kernel", SDES, **NAMES)
def test_a_kernel_may_jump_over_levels(kernel):
    """Merged steps: eta 0 is one Euler step of the whole length, and Flow-SDE's variance grows with that length."""
    latents, velocity, sigmas = step_inputs()
    at = (latents, velocity, sigmas[2], sigmas[5])
    mean, _ = bind(part(kernel, eta=0.0).bound, sigmas=sigmas)(*at)
    torch.testing.assert_close(mean, latents + velocity * (sigmas[5] - sigmas[2]))
    if kernel is kernels.flow_sde:
        _, std = kernel(*at, sigmas)
        expected = 0.49 * sigmas[2] / (1 - sigmas[2]) * (sigmas[2] - sigmas[5])
        torch.testing.assert_close(std**2, expected)


def test_cps_of_full_strength_draws_the_noise_afresh():
    latents, velocity, sigmas = step_inputs()
    mean, std = kernels.cps(latents, velocity, sigmas[4], sigmas[5], eta=1.0)
    torch.testing.assert_close(mean, (1 - sigmas[5]) * (latents - sigmas[4] * velocity))
    assert std == sigmas[5]


def test_bind_fills_in_only_what_a_kernel_asks_for():
    latents, velocity, sigmas = step_inputs()
    at = (latents, velocity, sigmas[1], sigmas[2])
    bound = bind(part(kernels.flow_sde, eta=0.3).bound, sigmas=sigmas)
    torch.testing.assert_close(bound(*at), kernels.flow_sde(*at, sigmas, eta=0.3))
    torch.testing.assert_close(bind(kernels.dance_sde, sigmas=sigmas)(*at), kernels.dance_sde(*at))


@pytest.mark.parametrize("kernel", [kernels.cps, kernels.ddim, kernels.ddim_sde], **NAMES)
@pytest.mark.parametrize("eta", [1.5, -0.1, float("nan")])
def test_an_eta_that_is_no_share_of_the_noise_is_refused(kernel, eta):
    """With eta 1.6 CPS would draw what it draws with .4, and say so to nobody."""
    with pytest.raises(ValueError, match=rf"^{kernel.__name__}: eta = {eta} is no share .*: expected 0 to 1\.$"):
        kernel(torch.zeros(1, 1), torch.zeros(1, 1), GRID[4:5], GRID[5:6], eta=eta)
