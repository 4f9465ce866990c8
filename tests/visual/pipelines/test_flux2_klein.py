"""FLUX.2 klein: a shift that depends on the steps, patches of latents, models distilled to few steps."""

import pytest
import torch
from diffusers import DiffusionPipeline
from tiny_pipelines import seeded
from tiny_pipelines.flux2_klein import pipeline

from flowrl.visual.pipelines import opening
from flowrl.visual.policy import Example


def velocity(policy, guidance):
    policy.guidance = guidance
    ids = policy.encode([Example("a red circle"), Example("two blue squares")])
    with torch.no_grad():
        return policy.velocity(torch.zeros(2, *policy.shape), torch.tensor([0.5, 0.75]), ids)


@pytest.mark.parametrize(("size", "steps", "mu"), [(256, 4, 2.291180), (256, 50, 2.023351), (16, 4, 1.945216)])
def test_the_shift_depends_on_the_steps(policy_of, size, steps, mu):
    """4096 and 16 patches; halfway sigma is 1 / (1 + exp(-mu)). The configuration's shift, 3, plays no part."""
    middle = policy_of("flux2-klein", size=size).sigmas(steps)[steps // 2]
    assert float(middle) == pytest.approx(1 / (1 + torch.tensor(-mu).exp().item()), abs=1e-6)


@pytest.mark.parametrize(("guidance", "rows"), [(1.0, 2), (4.0, 4)])
def test_guidance_takes_a_pair_of_rows(policy_of, spied, guidance, rows):
    policy = policy_of("flux2-klein")
    calls = spied(policy.pipe.transformer)
    velocity(policy, guidance)
    assert [call.hidden_states.shape for call in calls] == [(rows, 16, 16)]
    assert calls[0].timestep.tolist() == [0.5, 0.75] * (rows // 2)


def test_latents_are_patches(policy_of):
    """16 = 4 x 2 x 2 channels, a quarter of the places of the autoencoder's latents."""
    assert policy_of("flux2-klein", size=(16, 8)).shape == (16, 4, 2)


def test_decoding_undoes_the_statistics_of_the_batch_norm(policy_of):
    """What the pipeline makes of a picture, decoded, is what the autoencoder alone makes of it."""
    policy = policy_of("flux2-klein")
    pipe, picture = policy.pipe, torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        alone = pipe.vae.decode(pipe.vae.encode(picture).latent_dist.mode()).sample
        ours = policy.family.decode(pipe._encode_vae_image(picture, generator=None))
    assert torch.allclose(ours, alone, atol=1e-5)


def test_a_model_distilled_to_few_steps_takes_no_guidance(tmp_path):
    """The pipeline would ignore it; that the model is distilled is saved with it."""
    seeded(lambda: pipeline(distilled=True))().save_pretrained(tmp_path / "distilled")
    settings = {"dtype": torch.float32, "device": torch.device("cpu"), "rank": 0, "alpha": 1.0}
    policy = opening.load(tmp_path / "distilled", **settings, size=16, max_sequence_length=96)
    assert velocity(policy, 1.0).shape == (2, 16, 4, 4)
    with pytest.raises(ValueError, match="guidance = 4: this Flux2KleinPipeline draws without guidance; accepted is 1"):
        policy.guidance = 4.0
        policy.encode([Example("a")])
    policy.save(tmp_path / "model")
    assert DiffusionPipeline.from_pretrained(tmp_path / "model").config.is_distilled


def test_adapters_sit_on_both_kinds_of_blocks(policy_of):
    names = {name.partition(".lora_A.")[0] for name, _ in policy_of("flux2-klein").trainable() if ".lora_A." in name}
    assert sum(name.startswith("transformer_blocks.0.") for name in names) == 12
    assert "single_transformer_blocks.0.attn.to_qkv_mlp_proj" in names


def test_a_size_between_patches_is_refused_with_its_neighbours(policy_of):
    with pytest.raises(ValueError, match=r"model\.size = 18: accepted are multiples of 4, such as 16 or 20\."):
        policy_of("flux2-klein", size=18)


def test_long_prompts_are_counted_beside_the_template(policy_of):
    """Of 96 tokens, one per letter, the template takes 25: <|im_start|>, "user", <think> and the like."""
    policy = policy_of("flux2-klein")
    ((_, limit),) = policy.family.readers()
    assert limit == 96 - 25
    lines = policy.warnings([Example("x" * limit), Example("x" * (limit + 1))])
    assert [line.split(".")[0] for line in lines] == ["1 of 2 prompts exceed the tokenizer's 71 tokens; cut there"]
