"""The SD3 adapter against plain diffusers."""

from functools import partial
from itertools import product

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from flowrl import decays, randomness
from flowrl.part import part
from flowrl.recipe import Snapshot, frozen
from flowrl.visual.pipelines import opening
from flowrl.visual.pipelines.grids import shift_by_tokens
from flowrl.visual.pipelines.policy import PipelinePolicy
from flowrl.visual.pipelines.sd3 import StableDiffusion3
from flowrl.visual.policy import Example, Policy
from samplers import kernels, rollout
from samplers.kernels import bind

FIVE = ["a red circle", "two blue squares", "a green cross", "the number 12 in red", "three yellow triangles"]
TWICE_SHIFTED = [1, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.0089, 0]


def noise_of(policy, n, seed=0):
    return policy.noise(n, randomness.generator(seed, "test"))


def ode_latents(policy, prompts, noise, steps, guidance, batch_size=None):
    policy.guidance = guidance
    ids = policy.encode([Example(p) for p in prompts])
    tree = rollout(policy.velocity, noise, ids, policy.sigmas(steps), noisy=(), batch_size=batch_size)
    return tree.leaves()


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("grid", ["linear", "pipeline"])
@pytest.mark.parametrize("kind", ["base", "sd3 with T5", "sd3.5", "dynamic"])
def test_the_ode_rollout_is_the_pipeline(opened, plain, kind, grid, guidance):
    """C31, C39: the same noise gives the same latents, pictures and pixels as pipe(...)."""
    policy, pipe, steps = opened(kind, grid=grid), plain(kind), 10
    prompts, noise = FIVE[:3], noise_of(policy, 3)
    schedule = {"num_inference_steps": steps}
    if grid == "linear":
        schedule["sigmas"] = torch.linspace(1, 1 / steps, steps).tolist()
    ours = ode_latents(policy, prompts, noise, steps, guidance)
    given = {"prompt": prompts, "guidance_scale": guidance, "max_sequence_length": policy.family.max_sequence_length}
    theirs = pipe(**given, **schedule, latents=noise.clone(), output_type="latent").images
    assert torch.allclose(ours, theirs, atol=1e-4), (ours - theirs).abs().max()
    assert (ours - noise).abs().max() > 0.1
    with torch.no_grad():
        drawn = pipe.vae.decode(theirs / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor).sample
    pixels = pipe.image_processor.postprocess(drawn, output_type="pt")
    assert torch.allclose(policy.decode(ours), pixels, atol=0.5 / 255 + 1e-4)


def test_guidance_changes_what_is_drawn(opened):
    policy = opened()
    noise = noise_of(policy, 2)
    one, four = (ode_latents(policy, FIVE[:2], noise, 4, guidance) for guidance in (1.0, 4.0))
    assert (one - four).abs().max() > 1e-2


def test_a_negative_prompt_is_the_pipelines(opened, plain):
    policy, pipe, noise = opened(), plain(), None
    noise, policy.guidance = noise_of(policy, 2), 3.0
    ids = policy.encode([Example("a red circle", "a blue square"), Example("two green crosses", "")])
    ours = rollout(policy.velocity, noise, ids, policy.sigmas(5)).leaves()
    theirs = pipe(
        prompt=["a red circle", "two green crosses"], negative_prompt=["a blue square", ""], guidance_scale=3.0,
        sigmas=torch.linspace(1, 0.2, 5).tolist(), latents=noise, max_sequence_length=0, output_type="latent",
    ).images  # fmt: skip
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_ten_steps_of_shift_three_are_the_published_table(opened):
    """C31: diffusers shifts in the constructor and again in set_timesteps."""
    sigmas = opened("sd3 with T5", grid="pipeline").sigmas(10)
    assert sigmas.dtype == torch.float32 and sigmas.tolist() == pytest.approx(TWICE_SHIFTED, abs=1e-4)


@pytest.mark.parametrize("kind", ["base", "sd3 with T5", "dynamic"])
def test_sigmas_are_those_of_the_scheduler_after_the_same_call(opened, plain, kind):
    """C31, C34."""
    policy, scheduler = opened(kind), plain(kind).scheduler
    for policy.grid, steps in product(StableDiffusion3.GRIDS, (1, 7, 28)):
        extra = {"mu": shift_by_tokens(scheduler.config, 16, most=1.16)} if kind == "dynamic" else {}
        if policy.grid == "linear":
            scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / steps, steps).tolist(), **extra)
        else:
            scheduler.set_timesteps(steps, **extra)
        assert torch.equal(policy.sigmas(steps), scheduler.sigmas)
        assert scheduler.timesteps.tolist() == pytest.approx((1000 * policy.sigmas(steps)[:-1]).tolist(), abs=1e-3)


def test_the_shift_follows_the_size_of_the_picture(opened, plain):
    """C34: mu comes from the number of image tokens of each policy, as diffusers computes it."""
    from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

    seen = {}
    for size, tokens in ((8, 4), (16, 16)):
        policy = opened("dynamic", grid="pipeline", size=size)
        config = policy.pipe.scheduler.config
        mu = calculate_shift(
            tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
        )
        scheduler = plain("dynamic").scheduler
        scheduler.set_timesteps(5, mu=mu)
        seen[size] = policy.sigmas(5)
        assert torch.allclose(seen[size], scheduler.sigmas, atol=1e-7)
    assert not torch.equal(seen[8], seen[16])


def test_asking_for_sigmas_leaves_the_pipelines_scheduler_alone(opened):
    policy = opened()
    before = policy.pipe.scheduler.sigmas.clone()
    policy.sigmas(3)
    assert torch.equal(policy.pipe.scheduler.sigmas, before)


@pytest.mark.parametrize("kind", ["base", "sd3 with T5"])
def test_the_transformer_is_told_a_thousand_times_sigma(opened, spied, kind):
    """C32: in rollout and in training, whatever the schedule."""
    policy = opened(kind, grid="pipeline")
    calls, sigmas = spied(policy.pipe.transformer), policy.sigmas(6)
    ode_latents(policy, FIVE[:2], noise_of(policy, 2), 6, 1.0)
    told = torch.stack([call.timestep for call in calls])
    assert torch.equal(told, 1000 * sigmas[:-1, None].expand(6, 2))


def test_without_guidance_there_is_no_second_pass_and_no_empty_prompt(opened, spied):
    """C44: B rows per call, and "" is never encoded."""
    policy = opened()
    calls, texts, encode = spied(policy.pipe.transformer), [], policy.pipe.encode_prompt
    policy.pipe.encode_prompt = lambda prompt, **rest: texts.extend(prompt) or encode(prompt=prompt, **rest)
    ode_latents(policy, FIVE, noise_of(policy, 5), 3, 1.0)
    assert [len(call.hidden_states) for call in calls] == [5, 5, 5] and policy.forwards == 15
    assert texts == FIVE
    ode_latents(policy, FIVE, noise_of(policy, 5), 2, 2.0)
    assert [len(call.hidden_states) for call in calls[3:]] == [10, 10] and policy.forwards == 35
    assert texts == [*FIVE, ""]


def test_a_prompt_is_encoded_once_however_often_it_is_asked_for(opened, spied):
    policy = opened(batch_size=2)
    rows = spied(policy.pipe.text_encoder)
    first = policy.encode([Example(p) for p in (*FIVE, *FIVE[:2])])
    again = policy.encode([Example(FIVE[4]), Example(FIVE[0])])
    assert [len(call.args[0]) for call in rows] == [1] * 5
    assert first.tolist() == [0, 1, 2, 3, 4, 0, 1] and again.tolist() == [4, 0]


def test_an_embedding_does_not_depend_on_what_is_encoded_beside_it(opened):
    """D8: bit by bit, or a resumed run, which meets its prompts in other company, would not be the same run."""
    together, alone = opened(), opened()
    together.encode([Example(p) for p in FIVE])
    for prompt in FIVE:
        alone.encode([Example(prompt)])
    for text, one in together._texts.items():
        assert one.keys() == {"tokens", "pooled"}
        for name, x in one.items():
            assert torch.equal(x, dict(alone._texts.items())[text][name])


def test_backwards_count_only_where_a_gradient_is_kept(opened):
    policy = opened()
    ids = policy.encode([Example(p) for p in FIVE[:2]])
    latents, sigma = noise_of(policy, 2), torch.full((2,), 0.5)
    policy.velocity(latents, sigma, ids)
    with torch.no_grad():
        policy.velocity(latents, sigma, ids)
    assert (policy.forwards, policy.backwards) == (4, 2)


def test_batches_of_a_rollout_do_not_change_it(opened):
    policy = opened()
    noise = noise_of(policy, 5)
    whole, parts = (ode_latents(policy, FIVE, noise, 4, 1.0, batch_size=size) for size in (None, 2))
    assert torch.allclose(whole, parts, atol=1e-5)


def test_pictures_are_on_the_levels_of_a_file_and_in_chunks_the_same(opened):
    policy, small = opened(batch_size=64), opened(batch_size=2)
    latents = noise_of(policy, 5)
    pictures = policy.decode(latents)
    assert pictures.shape == (5, 3, 32, 32) and float(pictures.min()) >= 0 and float(pictures.max()) <= 1
    assert torch.equal((pictures * 255).round() / 255, pictures)
    assert (small.decode(latents) - pictures).abs().max() <= 1 / 255 + 1e-6


def test_noise_is_drawn_on_the_cpu_from_the_generator_given(opened):
    policy = opened()
    assert torch.equal(noise_of(policy, 2), noise_of(policy, 2)) and not torch.equal(*noise_of(policy, 2))
    assert noise_of(policy, 2).shape == (2, 4, 8, 8) and isinstance(policy, Policy)


def test_dropout_is_off_even_if_the_pipeline_comes_in_training_mode(plain):
    """C25."""
    pipe = plain("sd3 with T5")
    for module in (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_3):
        module.train()
    pipe.transformer.transformer_blocks[0].attn.to_out[1].p = 0.5
    policy = PipelinePolicy(StableDiffusion3(pipe, max_sequence_length=4), dtype=torch.float32, rank=2, alpha=2.0)
    ids, latents = policy.encode([Example(FIVE[0])]), noise_of(policy, 1)
    with torch.no_grad():
        one, two = (policy.velocity(latents, torch.tensor([0.5]), ids) for _ in range(2))
    assert torch.equal(one, two) and not pipe.transformer.training


def test_a_decision_is_scored_by_its_step_and_not_by_its_timestep(opened):
    """C33: two hundred steps, of which bf16 timesteps repeat; each log-prob is found again at its own step."""
    policy, steps, window = opened("sd3 with T5", grid="pipeline"), 200, (150, 151, 152)
    sigmas = policy.sigmas(steps)
    rounded = (1000 * sigmas[:-1]).bfloat16()
    assert len(rounded.unique()) < steps
    ids = policy.encode([Example(p) for p in FIVE[:2]])
    kernel = bind(kernels.dance_sde, sigmas=sigmas)
    generators = [randomness.generator(0, i) for i in range(2)]
    tree = rollout(policy.velocity, noise_of(policy, 2), ids, sigmas, kernel, noisy=window, generators=generators)
    edges = tree.edge[:, list(window)].flatten()
    source, step = tree.states[tree.source[edges]], tree.step[edges]
    with torch.no_grad():
        velocity = policy.velocity(source, sigmas[step], tree.edge_prompt[edges])
    mean, std = kernel(source, velocity, sigmas[step], sigmas[step + 1])
    z = (tree.states[tree.target[edges]] - mean) / std[:, None, None, None]
    assert 0.8 < float(z.square().mean()) < 1.2
    assert step.tolist() == [*window, *window] and tree.log_prob[edges].isfinite().all()


@pytest.mark.parametrize("shift", [1.0, 3.0, 12.0])
def test_the_first_step_of_every_grid_has_a_finite_std(opened, shift):
    """C28: sigma is exactly 1 there."""
    policy = opened()
    policy.pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    for steps in (2, 10, 28):
        for policy.grid in StableDiffusion3.GRIDS:
            sigmas = policy.sigmas(steps)
            _, std = kernels.flow_sde(torch.zeros(1, 1), torch.zeros(1, 1), sigmas[:1], sigmas[1:2], sigmas)
            assert float(sigmas[0]) == 1 and 0 < float(std) < 50


def test_full_weights_are_saved_as_a_pipeline_and_taken_back(opened, plain, tmp_path):
    policy = opened()
    with torch.no_grad():
        for _, parameter in policy.trainable():
            parameter.mul_(1.02)
    policy.save(tmp_path / "model")
    prompts, noise = FIVE[:2], noise_of(policy, 2)
    ours = ode_latents(policy, prompts, noise, 4, 1.0)
    pipe = plain(folder=tmp_path / "model")
    theirs = pipe(
        prompt=prompts, sigmas=torch.linspace(1, 0.25, 4).tolist(), latents=noise, guidance_scale=1.0,
        max_sequence_length=0, output_type="latent",
    ).images  # fmt: skip
    assert torch.allclose(ours, theirs, atol=1e-4)
    fresh = opened()
    assert (ode_latents(fresh, prompts, noise, 4, 1.0) - ours).abs().max() > 1e-2
    fresh.load(tmp_path / "model")
    assert torch.equal(ode_latents(fresh, prompts, noise, 4, 1.0), ours)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_reference_is_the_start_and_leaves_the_policy_as_it_was(opened, rank):
    """C55, with adapters (switched off) and with all weights (a copy)."""
    policy = opened(rank=rank, alpha=8.0)
    policy.snapshot("ref", frozen(), 0)
    policy.snapshot("ema", Snapshot(part(decays.constant, share=0.5)), 0)
    ids, latents, sigma = policy.encode([Example(FIVE[0])]), noise_of(policy, 1), torch.tensor([0.7])
    with torch.no_grad():
        start = policy.velocity(latents, sigma, ids)
        for _, parameter in policy.trainable():
            parameter.add_(0.02)
        moved = policy.velocity(latents, sigma, ids)
        with policy.at("ref"):
            assert torch.allclose(policy.velocity(latents, sigma, ids), start, atol=1e-6)
        assert torch.equal(policy.velocity(latents, sigma, ids), moved) and not torch.allclose(moved, start, atol=1e-3)
    assert all(parameter.requires_grad for _, parameter in policy.trainable())
    assert policy.velocity(latents, sigma, ids).requires_grad


def test_weights_that_are_trained_are_fp32_and_the_rest_is_frozen(folders):
    half = opening.load(
        folders["base"], dtype=torch.bfloat16, device=torch.device("cpu"), rank=2, alpha=2.0, max_sequence_length=0
    )
    assert {p.dtype for _, p in half.trainable()} == {torch.float32}
    assert half.pipe.transformer.dtype == torch.bfloat16 and next(half.pipe.vae.parameters()).dtype == torch.float32
    assert not any(p.requires_grad for p in half.pipe.text_encoder.parameters())


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (["a red circle left of a blue square and a green cross"], ["1 of 1", "10 tokens", "'a red circle left"]),
        (["a dragon", "a red circle", "two dragons"], ["2 of 3", "does not know", "'a dragon'"]),
        (["\U0001f98a", "a red circle"], ["1 of 2", "does not know", r"'\U0001f98a'"]),
        (["", "a red circle"], []),
    ],
)
def test_what_the_tokenizer_cannot_read_is_counted(opened, prompts, said):
    """C75."""
    found = opened().warnings([Example(p) for p in prompts])
    assert bool(said) == bool(found) and all(words in found[-1] for words in said), found
    assert all(line.isascii() for line in found)


@pytest.mark.parametrize("prompt", ["", "   ", "\U0001f98a", "word " * 300, "\u732b", "a\nb\t'c'\"", "\u05d0", "a\0b"])
def test_any_text_can_be_drawn(opened, prompt):
    """C75."""
    policy = opened()
    assert ode_latents(policy, [prompt], noise_of(policy, 1), 2, 1.0).isfinite().all()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"size": 30}, "model.size = 30"),
        ({"size": 64}, "model.size = 64"),
        ({"max_sequence_length": 513}, "model.max_sequence_length = 513: StableDiffusion3Pipeline accepts up to 512."),
        ({"grid": "karras"}, "model.grid = 'karras'"),
        ({"rank": 4, "targets": ("attn.to_qq",)}, "Did you mean 'attn.to_q'?"),
    ],
)
def test_a_setting_that_the_pipeline_cannot_follow_is_refused(opened, settings, said):
    with pytest.raises(ValueError) as caught:
        opened(**settings)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def measured(sizes, tensor):
    sizes.append(tensor.nbytes)
    return tensor


@pytest.mark.parametrize("rank", [0, 4])
def test_gradient_checkpointing_keeps_less_and_changes_no_gradient(opened, rank):
    """C95: equal gradients, one for every weight, and fewer bytes kept for the backward pass."""
    gradients, kept = [], []
    for checkpointing in (False, True):
        policy = opened(rank=rank, alpha=8.0, gradient_checkpointing=checkpointing)
        for name, parameter in policy.trainable():
            if ".lora_B." in name:
                parameter.data.fill_(0.01)
        latents, prompt = noise_of(policy, 4), policy.encode([Example("a red circle")])
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(partial(measured, sizes), lambda x: x):
            out = policy.velocity(latents, torch.full((4,), 0.7), prompt.repeat(4))
        (out**2).mean().backward()
        kept.append(sum(sizes))
        gradients.append({name: p.grad for name, p in policy.trainable()})
    assert all(x is not None for found in gradients for x in found.values()) and kept[1] < 0.5 * kept[0]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=1e-5)


def test_a_shift_is_a_grid_of_even_steps(opened):
    policy = opened("sd3 with T5", grid=3.0)
    assert policy.sigmas(4).tolist() == pytest.approx([1, 0.9, 0.75, 0.5, 0])


@pytest.mark.parametrize("grid", ["cosine", "3"])
def test_another_grid_is_refused_with_those_there_are(opened, grid):
    with pytest.raises(ValueError, match=r"model\.grid = .*accepts pipeline, linear, a shift"):
        opened("base", grid=grid)
