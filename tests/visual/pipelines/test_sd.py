"""Stable Diffusion and SDXL: calls of the UNet, sizes, long prompts, what is beside the text."""

import json
import shutil

import pytest
import torch
from tiny_pipelines.sd import first, unet

from flowrl import randomness
from flowrl.visual.pipelines import blueprint, contract, footprint, opening
from flowrl.visual.pipelines.sd import StableDiffusion
from flowrl.visual.policy import Example
from samplers import rollout

PROMPTS = [Example("a red circle"), Example("two blue squares")]
CPU = torch.device("cpu")


def noise_of(policy, n):
    return policy.noise(n, randomness.generator(0, "test"))


@pytest.mark.parametrize(("guidance", "rows"), [(1.0, 2), (4.0, 4)])
def test_a_step_is_one_call_at_a_whole_timestep(policy_of, spied, guidance, rows):
    policy = policy_of("sd1.5")
    calls, policy.guidance = spied(policy.pipe.unet), guidance
    rollout(policy.velocity, noise_of(policy, 2), policy.encode(PROMPTS), policy.sigmas(3))
    told = [call.args[1] for call in calls]
    assert [x.tolist() for x in told] == [[667] * rows, [334] * rows, [1] * rows]
    assert all(x.dtype == torch.int64 for x in told) and policy.forwards == 3 * rows


@pytest.mark.parametrize(("size", "near"), [(30, "24 or 32"), (4, "8")])
def test_a_size_that_the_pipeline_refuses_is_refused_with_the_nearest(policy_of, size, near):
    """Latents of half its pixels could follow; diffusers asks for multiples of 8."""
    with pytest.raises(ValueError, match=rf"model.size = {size}: accepted are multiples of 8, such as {near}\."):
        policy_of("sd1.5", size=size)


def test_the_default_size_is_the_unets(saved):
    def opened(**sides):
        pipe = first()
        pipe.unet = unet(**sides)
        family = StableDiffusion(pipe)
        return family.height, family.width, family.shape()

    assert opened() == (16, 16, (4, 8, 8)) and opened(sample_size=(12, 8)) == (24, 16, (4, 12, 8))


def test_a_prompt_longer_than_clip_reads_is_counted(policy_of):
    found = policy_of("sd1.5").warnings([Example("a red circle"), Example("x" * 80)])
    assert len(found) == 1 and found[0].startswith("1 of 2 prompts exceed the tokenizer's 77 tokens")


@pytest.mark.parametrize("setting", ["frames", "max_sequence_length"])
def test_settings_of_other_pipelines_are_refused(policy_of, setting):
    with pytest.raises(ValueError, match=f"model.{setting} = 9 has no effect"):
        policy_of("sd1.5", **{setting: 9})


def test_a_distilled_unet_with_guidance_as_an_input_is_refused():
    pipe = first()
    pipe.unet = unet(time_cond_proj_dim=8)
    with pytest.raises(ValueError, match=r"unet\.time_cond_proj_dim = 8: .* expected one without"):
        StableDiffusion(pipe)


@pytest.mark.parametrize("grid", ["linear", 3.0])
def test_grids_that_ddim_cannot_walk_are_refused(policy_of, grid):
    with pytest.raises(ValueError, match=rf"model.grid = '?{grid}'?: StableDiffusionPipeline accepts pipeline\."):
        policy_of("sd1.5", grid=grid)


def test_what_is_saved_keeps_its_own_scheduler(policy_of, plain_of, tmp_path):
    policy_of("sd1.5", train="full").save(tmp_path / "model")
    saved = plain_of("sd1.5", tmp_path / "model")
    assert type(saved.scheduler).__name__ == "PNDMScheduler" and saved.safety_checker is None
    assert saved.scheduler.config.set_alpha_to_one is False and not saved.config.requires_safety_checker


def test_xl_is_told_the_size_that_it_draws(policy_of, spied):
    policy = policy_of("sdxl", size=(24, 16))
    calls = spied(policy.pipe.unet)
    with torch.no_grad():
        policy.velocity(noise_of(policy, 2), torch.tensor([0.9, 0.3]), policy.encode(PROMPTS))
    assert calls[0].added_cond_kwargs["time_ids"].tolist() == [[24, 16, 0, 0, 24, 16]] * 2
    assert calls[0].added_cond_kwargs["text_embeds"].shape == (2, 16)


@pytest.mark.parametrize("forced", [True, False])
def test_xl_guides_away_from_zeros_or_from_the_empty_text_as_the_pipeline_says(policy_of, plain_of, forced):
    """force_zeros_for_empty_prompt, for no negative prompt alone: an empty prompt is a text."""
    policy, pipe = policy_of("sdxl"), plain_of("sdxl")
    policy.pipe.register_to_config(force_zeros_for_empty_prompt=forced)
    pipe.register_to_config(force_zeros_for_empty_prompt=forced)
    _, negative, _, pooled = pipe.encode_prompt("a red circle", device=CPU)
    ours = policy.family.encode_negative("", (), CPU)
    assert torch.equal(ours["tokens"], negative[0]) and torch.equal(ours["pooled"], pooled[0])
    assert bool(ours["tokens"].any()) is not forced
    assert (
        policy.family.encode("", (), CPU)["tokens"].any()
        and policy.family.encode_negative("a", (), CPU)["tokens"].any()
    )


def test_xl_takes_the_mean_and_std_of_its_autoencoder(policy_of):
    """Of those checkpoints that have them; as the pipeline decodes."""
    policy = policy_of("sdxl")
    policy.pipe.vae.register_to_config(latents_mean=[0.5, -1.0, 0.0, 2.0], latents_std=[2.0, 1.0, 0.5, 3.0])
    policy.guidance, noise = 1.0, noise_of(policy, 2)
    assert contract.pictures_apart(policy, PROMPTS, steps=2, guidance=1.0) < 1e-4
    with torch.no_grad():
        scaled = policy.family.decode(noise)
        policy.pipe.vae.register_to_config(latents_mean=None, latents_std=None)
        assert (scaled - policy.family.decode(noise)).abs().max() > 0.05


@pytest.mark.parametrize("name", ["sd1.5", "sdxl"])
def test_in_bf16_the_pipeline_draws_nearly_the_same(policy_of, name):
    """`flowrl check` on a checkpoint in half precision: the pipeline alone would mix dtypes."""
    policy = policy_of(name, dtype=torch.bfloat16)
    assert contract.pictures_apart(policy, PROMPTS, steps=3, guidance=1.0) < 3e-2


@pytest.mark.parametrize("name", ["sd1.5", "sdxl"])
def test_memory_is_measured_without_weights(saved, name):
    plan = blueprint.read(saved(name))
    found = footprint.activations(plan.family(plan.pipe, size=16), torch.float32)
    assert 0 < found.block < found.checkpointed < found.kept


def test_a_safety_checker_is_neither_loaded_nor_planned(saved, tmp_path):
    """As published, SD 1.5 has one, and it would see no picture that is trained on."""
    shutil.copytree(saved("sd1.5"), tmp_path / "model")
    index = json.loads((tmp_path / "model/model_index.json").read_text())
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    (tmp_path / "model/model_index.json").write_text(json.dumps(index))
    known = {"dtype": torch.float32, "device": torch.device("cpu"), "rank": 0, "alpha": 1.0}
    assert opening.load(tmp_path / "model", **known).pipe.safety_checker is None
    assert blueprint.read(tmp_path / "model").pipe.safety_checker is None
