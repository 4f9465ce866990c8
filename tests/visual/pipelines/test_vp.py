"""Variance-preserving models as flows: levels, the change of variables, DDIM's step, what trains on them."""

import math

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    PNDMScheduler,
)
from tiny_pipelines.sd import BETAS, SAVED

from flowrl import randomness
from flowrl.changes import changed
from flowrl.recipes import find
from flowrl.visual.contract import check_direction
from flowrl.visual.pipelines import grids
from flowrl.visual.policy import Example
from rewards.table import RewardTable
from samplers import density, kernels, rollout, schedules
from samplers.kernels import spread

SCHEDULERS = [
    PNDMScheduler(**BETAS, **SAVED, skip_prk_steps=True),
    EulerDiscreteScheduler(**BETAS, steps_offset=1, timestep_spacing="leading"),
    DPMSolverMultistepScheduler(num_train_timesteps=600),
    DDIMScheduler(**BETAS, prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing"),
]
NAMES = {"argvalues": SCHEDULERS, "ids": [type(x).__name__ for x in SCHEDULERS]}
PROMPTS = [Example("a red circle"), Example("two blue squares")]


def noise_of(policy, n, seed=0):
    return policy.noise(n, randomness.generator(seed, "test"))


# Levels


@pytest.mark.parametrize("scheduler", **NAMES)
def test_the_one_step_scheduler_is_of_the_same_process(scheduler):
    """Its own values where it did not name them: DPM-Solver's linspace is not DDIM's default."""
    ours, config = grids.ddim(scheduler), scheduler.config
    assert isinstance(ours, DDIMScheduler) and float(ours.final_alpha_cumprod) == 1
    assert torch.allclose(ours.alphas_cumprod, scheduler.alphas_cumprod, rtol=1e-6, atol=1e-7)
    spacing = "trailing" if config.timestep_spacing == "linspace" else config.timestep_spacing
    assert ours.config.timestep_spacing == spacing and ours.config.steps_offset == config.steps_offset
    assert ours.config.prediction_type == config.prediction_type and not ours.config.clip_sample


@pytest.mark.parametrize("scheduler", **NAMES)
def test_a_level_holds_the_cumulative_alpha(scheduler):
    levels, kept = grids.table(scheduler), scheduler.alphas_cumprod
    assert levels.dtype == torch.float32 and bool((levels.diff() > 0).all())
    assert torch.allclose((1 - levels) ** 2 / ((1 - levels) ** 2 + levels**2), kept, atol=1e-6)


def test_the_levels_of_stable_diffusion():
    """a is 0.99915 at timestep 0 and 0.0046600 at 999, as published."""
    levels = grids.table(SCHEDULERS[0])
    assert [float(levels[t]) for t in (0, 500, 999)] == pytest.approx([0.028341, 0.618070, 0.935958], abs=1e-5)


@pytest.mark.parametrize("scheduler", **NAMES)
@pytest.mark.parametrize("steps", [1, 4, 20, 50])
def test_a_grid_walks_ddims_timesteps_and_ends_at_zero(scheduler, steps):
    walk, levels = grids.ddim(scheduler), grids.table(scheduler)
    walk.set_timesteps(steps)
    found = schedules.check(grids.walked_by_ddim(scheduler, steps))
    assert torch.equal(found[:-1], levels[walk.timesteps]) and len(found) == steps + 1
    assert (float(found[0]) == 1) == bool(scheduler.config.get("rescale_betas_zero_snr"))


def test_fifty_steps_of_stable_diffusion_begin_at_timestep_981():
    found = grids.walked_by_ddim(SCHEDULERS[0], 50)
    assert torch.equal(found[:2], grids.table(SCHEDULERS[0])[[981, 961]]) and found[-2] == grids.table(SCHEDULERS[0])[1]


def test_where_ddim_rounds_its_steps_otherwise_than_its_timesteps_the_level_is_at_most_one_off():
    scheduler = DPMSolverMultistepScheduler()
    walk = grids.ddim(scheduler)
    for steps in (3, 6, 7, 20):
        walk.set_timesteps(steps)
        reached = walk.timesteps[:-1] - 1000 // steps
        assert (reached - walk.timesteps[1:]).abs().max() <= 1, steps


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        (FlowMatchEulerDiscreteScheduler(), "FlowMatchEulerDiscreteScheduler: expected a variance-preserving one"),
        (DDIMScheduler(prediction_type="sample"), "DDIMScheduler: expected a variance-preserving one"),
        (DDIMScheduler(rescale_betas_zero_snr=True), "expected prediction_type = v_prediction"),
    ],
)
def test_another_process_is_refused(scheduler, said):
    with pytest.raises(ValueError) as caught:
        grids.table(scheduler)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_more_steps_than_timesteps_are_refused():
    with pytest.raises(ValueError, match="1000 steps: the scheduler has 1000 timesteps; accepted are 1 to 999"):
        grids.walked_by_ddim(SCHEDULERS[0], 1000)


# The change of variables


@pytest.mark.parametrize("name", ["sd1.5", "sd2-v", "pixart"])
def test_every_level_of_the_table_is_its_own_timestep_and_others_go_to_the_nearest(policy_of, name):
    family = policy_of(name).family
    levels = grids.table(family.pipe.scheduler)
    assert torch.equal(family.timestep(levels), torch.arange(len(levels)))
    low, high = levels[:-1], levels[1:]
    assert torch.equal(family.timestep(low + 0.4 * (high - low)), torch.arange(len(low)))
    assert torch.equal(family.timestep(low + 0.6 * (high - low)), torch.arange(len(low)) + 1)
    assert family.timestep(torch.tensor([1.0, 0.0])).tolist() == [len(levels) - 1, 0]


def test_a_timestep_is_found_without_looking_at_a_number(policy_of):
    """On a device without numbers: nothing waits for the host."""
    family = policy_of("sd1.5").family
    family.predict = lambda latents, timestep, texts: latents * timestep.view(-1, 1, 1, 1)
    latents, sigma = torch.empty(2, 4, 8, 8, device="meta"), torch.empty(2, device="meta")
    assert family.velocity(latents, sigma, [], None).shape == latents.shape
    assert family.timestep(torch.tensor([0.5])).device.type == "cpu"


def exact(family, picture):
    """Predict as a network that knows the picture: the noise is what is left of the latents."""
    kept = grids.ddim(family.pipe.scheduler).alphas_cumprod

    def predict(latents, timestep, texts):
        signal, noise = (spread(x[timestep], latents) for x in (kept.sqrt(), (1 - kept).sqrt()))
        epsilon = (latents - signal * picture) / noise
        return epsilon if family.predicts == "epsilon" else signal * epsilon - noise * picture

    return predict


@pytest.mark.parametrize("name", ["sd1.5", "sd2-v"])
def test_the_velocity_is_noise_minus_data(policy_of, name):
    """On the table exactly; beyond it, the latents' own scale is kept and the number stays finite."""
    family, draw = policy_of(name).family, torch.Generator().manual_seed(0)
    picture, noise = (torch.randn(6, 4, 8, 8, generator=draw) for _ in range(2))
    family.predict = exact(family, picture)
    sigma = grids.table(family.pipe.scheduler)[[0, 1, 250, 500, 750, 999]]
    latents = (1 - spread(sigma, picture)) * picture + spread(sigma, picture) * noise
    assert torch.allclose(family.velocity(latents, sigma, [], None), noise - picture, atol=2e-4)
    seen, family.predict = [], lambda latents, timestep, texts: seen.append(latents) or latents
    ends = family.velocity(noise, torch.tensor([1.0, 0.99, 0.95, 0.01, 0.001, 0.0]), [], None)
    assert torch.equal(seen[0][[0, 5]], noise[[0, 5]]) and ends.isfinite().all()


# DDIM's step


@pytest.mark.parametrize("steps", [4, 10])
@pytest.mark.parametrize("name", ["sd1.5", "sd2-v", "sdxl"])
def test_the_ddim_kernel_is_ddims_step_with_eta_1(policy_of, name, steps):
    """Mean, standard deviation and log-prob, in the model's own variables, at every step."""
    policy, kernel = policy_of(name), kernels.ddim
    scheduler, sigmas = grids.ddim(policy.pipe.scheduler), policy.sigmas(steps)
    scheduler.set_timesteps(steps)
    prompt = policy.encode(PROMPTS)
    texts = [policy._active[i][0] for i in prompt.tolist()]
    generators = [randomness.generator(0, i) for i in range(2)]
    tree = rollout(
        policy.velocity, noise_of(policy, 2), prompt, sigmas, kernel, noisy=range(steps - 1), generators=generators
    )
    own = torch.hypot(1 - sigmas, sigmas)  # latents of the model: ours over this
    for t in range(steps - 1):
        edge = tree.edge[:, t]
        source, target = tree.states[tree.source[edge]], tree.states[tree.target[edge]]
        sigma, sigma_next = sigmas[t].expand(2), sigmas[t + 1].expand(2)
        with torch.no_grad():
            mean, std = kernel(source, policy.velocity(source, sigma, prompt), sigma, sigma_next)
            timestep, latents = scheduler.timesteps[t], source / own[t]
            predicted = policy.family.predict(latents, timestep.expand(2), texts)
        no, one = torch.zeros_like(latents), torch.ones_like(latents)
        theirs = scheduler.step(predicted, timestep, latents, eta=1.0, variance_noise=no).prev_sample
        off = scheduler.step(predicted, timestep, latents, eta=1.0, variance_noise=one).prev_sample - theirs
        assert (mean / own[t + 1] - theirs).abs().max() < 1e-4
        assert torch.allclose(spread(std / own[t + 1], off).expand(off.shape), off, atol=1e-4 * float(std[0]) + 2e-6)
        published = scheduler._get_variance(timestep, timestep - 1000 // steps).sqrt()
        assert float(std[0] / own[t + 1]) == pytest.approx(float(published), abs=1e-4)
        theirs = density.gaussian(target / own[t + 1], theirs, published.expand(2))
        assert torch.allclose(tree.log_prob[edge] + own[t + 1].log(), theirs, atol=1e-4)


# What trains on them


@pytest.mark.parametrize("steps", [4, 10, 50])
def test_every_kernel_is_finite_on_a_grid_that_begins_below_1(policy_of, steps):
    sigmas = policy_of("sd1.5").sigmas(steps)
    assert 0.6 < float(sigmas[0]) < 0.94
    for kernel in (kernels.flow_sde, kernels.dance_sde, kernels.cps, kernels.ddim, kernels.ddim_sde, kernels.sage):
        std, slope = kernels.scales(kernel, sigmas)
        assert std.isfinite().all() and slope.isfinite().all() and bool((std[:-1] > 0).all()), kernel.__name__
    schedules.check(schedules.compressed(sigmas, steps // 2))


@pytest.mark.parametrize("name", ["sd1.5", "sd2-v"])
def test_a_rollout_begins_at_noise_of_unit_variance(policy_of, name):
    policy, seen = policy_of(name), []
    family, predict = policy.family, policy.family.predict
    family.predict = lambda latents, timestep, texts: seen.append(latents) or predict(latents, timestep, texts)
    noise = noise_of(policy, 2)
    rollout(policy.velocity, noise, policy.encode(PROMPTS), policy.sigmas(3))
    assert torch.allclose(seen[0], noise, atol=1e-6)


@pytest.mark.parametrize("name", ["sd1.5", "sd2-v"])
def test_a_reversed_sign_is_told_on_a_grid_that_begins_below_1(policy_of, monkeypatch, name):
    """C38: a network that knows its picture explains it, and the same with the sign reversed is told."""
    policy = policy_of(name)
    policy.family.predict = exact(policy.family, torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(1)))
    found = check_direction(policy, PROMPTS)
    assert min(found, key=found.get) == "" and found[""] < 0.01 and min(list(found.values())[1:]) > 0.4
    velocity = policy.velocity
    monkeypatch.setattr(policy, "velocity", lambda x, sigma, prompt: -velocity(x, sigma, prompt))
    with pytest.raises(ValueError, match="the sign of velocity looks reversed"):
        check_direction(policy, PROMPTS)


FORWARD = {  # levels up to 1, beyond the table, and between its entries
    "awm": {"rollout.steps": 6, "rollout.roots": 2, "noising.draws": 3, "noising.times.shift": 20.0},
    "diffusion_nft": {"rollout.steps": 5, "rollout.roots": 2, "noising.draws": 3, "noising.times.shift": 20.0},
}


@pytest.mark.parametrize("name", ["sd1.5", "sd2-v"])
@pytest.mark.parametrize("recipe", FORWARD)
def test_methods_of_the_forward_process_train_at_levels_between_and_beyond_timesteps(policy_of, loop, recipe, name):
    recipe = changed(find(recipe)(), FORWARD[recipe]).check()
    policy, told = policy_of(name), []
    for suffix, rule in recipe.snapshots.items():
        policy.snapshot(suffix, rule, 0)
    learner, before = loop.learner(policy), [p.detach().clone() for _, p in policy.trainable()]
    timestep = policy.family.timestep
    policy.family.timestep = lambda sigma: told.append(sigma) or timestep(sigma)
    for iteration in range(2):
        log = loop.update(policy, recipe, learner, iteration, examples=PROMPTS, score=redness)
        assert all(math.isfinite(x) for x in log.values() if isinstance(x, float))
    sigma, levels = torch.cat(told), grids.table(policy.pipe.scheduler)
    assert bool((sigma > levels[-1]).any()) and not bool(torch.isin(sigma, levels).all())
    moved = [(p - was).abs().max() for (_, p), was in zip(policy.trainable(), before, strict=True)]
    assert float(torch.stack(moved).detach().max()) > 1e-4


def redness(images, examples, group):
    value = images[:, 0].mean((1, 2))[:, None]
    return RewardTable(value, torch.ones(1), group, torch.ones(len(value), dtype=torch.bool), ("red",))
