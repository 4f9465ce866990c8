"""Z-Image's own conventions: lists, time that runs the other way, and a guidance scale that is one less."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from tiny_pipelines import tiny

from flowrl.visual.pipelines.z_image import ZImage
from flowrl.visual.policy import Example

TWO = [Example("a red circle"), Example("two blue squares", "a red circle")]


@pytest.mark.parametrize(("guidance", "rows"), [(1.0, 2), (3.0, 4)])
def test_a_step_is_one_call_with_a_sample_and_a_text_per_row(policy_of, spied, guidance, rows):
    policy = policy_of("z-image")
    policy.guidance, calls = guidance, spied(policy.pipe.transformer)
    ids, latents = policy.encode(TWO), torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        policy.velocity(latents, torch.tensor([0.9, 0.25]), ids)
    ((samples, time, texts),) = [call.args for call in calls]
    assert [tuple(sample.shape) for sample in samples] == [(4, 1, 8, 8)] * rows and len(texts) == rows
    assert time.tolist() == pytest.approx([0.1, 0.75] * (rows // 2))
    chat = 8  # <|im_start|> user \n ... <|im_end|> \n <|im_start|> assistant \n
    assert [len(text) for text in texts[-2:]] == [len(policy.pipe.tokenizer(e.prompt).input_ids) + chat for e in TWO]


def test_guidance_is_the_pipelines_scale_and_one(policy_of):
    """neg + g (pos - neg) is pos + w (pos - neg) where w = g - 1."""
    policy = policy_of("z-image")
    latents, sigma, velocity = torch.randn(2, 4, 8, 8), torch.full((2,), 0.5), {}
    flipped = [Example(e.negative_prompt, e.prompt) for e in TWO]
    with torch.no_grad():
        for name, examples, policy.guidance in (("pos", TWO, 1.0), ("neg", flipped, 1.0), ("both", TWO, 6.0)):
            velocity[name] = policy.velocity(latents, sigma, policy.encode(examples))
    expected = velocity["pos"] + 5.0 * (velocity["pos"] - velocity["neg"])
    assert torch.allclose(velocity["both"], expected, atol=1e-5)


@pytest.mark.parametrize(("size", "mu"), [((16, 16), 0.459375), ((12, 8), 0.457682)])
def test_the_shift_follows_the_number_of_tokens(size, mu):
    """16 and 6 tokens, by 0.65 / 3840 each from 0.5 at 256; the middle of two steps is exp(mu) / (exp(mu) + 1)."""
    pipe = tiny()["z-image"].build()
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    sigmas = ZImage(pipe, size=size, max_sequence_length=32).sigmas(2, "pipeline")
    assert sigmas.tolist() == pytest.approx([1.0, torch.tensor(mu).sigmoid().item(), 0.0], abs=1e-5)


@pytest.mark.parametrize("size", [18, (16, 36)])
def test_a_size_without_places_is_refused_with_the_nearest(size):
    near = "16 or 20" if size == 18 else "32"
    with pytest.raises(ValueError, match=f"multiples of 4 up to 32, such as {near}"):
        ZImage(tiny()["z-image"].build(), size=size, max_sequence_length=32)


def test_a_text_without_places_is_refused():
    with pytest.raises(ValueError, match=r"max_sequence_length = 65: ZImagePipeline accepts up to 64\."):
        ZImage(tiny()["z-image"].build(), size=16, max_sequence_length=65)


def test_prompts_are_counted_beside_the_chat_around_them(policy_of):
    """32 tokens, of which the chat takes eight."""
    policy = policy_of("z-image")
    fits, long = "!" * 24, "!" * 25
    assert len(policy.pipe.tokenizer(long).input_ids) == 25
    assert policy.warnings([Example(fits)]) == []
    assert policy.warnings([Example(fits), Example(long)]) == [
        f"1 of 2 prompts exceed the tokenizer's 24 tokens; cut there. First: {long!a}"
    ]


def test_a_pipeline_without_a_size_draws_1024():
    pipe = tiny()["z-image"].build()
    pipe.transformer.axes_lens = [80, 256, 256]
    assert ZImage(pipe, max_sequence_length=32).shape() == (4, 512, 512)
