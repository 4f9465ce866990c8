"""Qwen-Image's own conventions: packed tokens, masks, guidance that keeps their length, a shift that ends at 0.02."""

import math

import pytest
import torch
from tiny_pipelines import tiny

from flowrl.visual.pipelines.lora import lora_weights
from flowrl.visual.pipelines.qwen_image import QwenImage
from flowrl.visual.policy import Example

TWO = [Example("a red circle"), Example("two blue squares")]


@pytest.mark.parametrize(("guidance", "rows"), [(1.0, 2), (3.0, 4)])
def test_a_step_is_one_call_with_a_mask_over_texts_of_different_lengths(policy_of, spied, guidance, rows):
    policy = policy_of("qwen-image", size=(12, 8))
    policy.guidance, calls = guidance, spied(policy.pipe.transformer)
    ids, latents, end = policy.encode(TWO), torch.randn(2, 4, 6, 4), 5  # <|im_end|> \n <|im_start|> assistant \n
    with torch.no_grad():
        policy.velocity(latents, torch.tensor([0.9, 0.25]), ids)
    (call,) = calls
    assert call.hidden_states.shape == (rows, 6, 16) and call.img_shapes == [[(1, 3, 2)]] * rows
    assert call.timestep.tolist() == pytest.approx([0.9, 0.25] * (rows // 2))
    lengths = [len(policy.pipe.tokenizer(e.prompt).input_ids) + end for e in TWO]
    assert lengths[0] != lengths[1]
    assert call.encoder_hidden_states_mask.sum(1).tolist() == [end] * (rows - 2) + lengths


def test_texts_of_one_length_need_no_mask(policy_of, spied):
    policy = policy_of("qwen-image")
    calls, ids = spied(policy.pipe.transformer), policy.encode(TWO[:1])
    with torch.no_grad():
        policy.velocity(torch.randn(2, 4, 8, 8), torch.full((2,), 0.5), ids.repeat(2))
    assert calls[0].encoder_hidden_states_mask is None


def test_guidance_turns_every_token_and_keeps_its_length():
    family = QwenImage(tiny()["qwen-image"].build(), size=16)
    negative, positive = torch.randn(2, 2, 4, 8, 8)
    guided = family.guide(negative, positive, 4.0)
    plain = negative + 4.0 * (positive - negative)
    lengths = [family.packed(x).norm(dim=-1) for x in (guided, positive, plain)]
    assert lengths[0].shape == (2, 16) and torch.allclose(lengths[0], lengths[1], atol=1e-5)
    patch = (..., slice(2, 4), slice(6, 8))
    ratio = (lengths[1] / lengths[2])[:, 7]  # second row, fourth column
    assert torch.allclose(guided[patch], plain[patch] * ratio.view(2, 1, 1, 1), atol=1e-5)


@pytest.mark.parametrize(("size", "mu", "second"), [((16, 16), 0.487903, 0.58238), (1024, 3.790323, 0.74679)])
def test_the_shift_follows_the_number_of_tokens_and_ends_at_its_terminal(size, mu, second):
    """mu = 0.5 + 0.4 (n - 256) / 7936 of n = 16 and 65536 tokens; the last level goes from its place to 0.02."""
    middle, last = (math.exp(mu) / (math.exp(mu) + 1 / x - 1) for x in (2 / 3, 1 / 3))
    assert 1 - (1 - middle) * 0.98 / (1 - last) == pytest.approx(second, abs=1e-5)
    sigmas = QwenImage(tiny()["qwen-image"].build(), size=size).sigmas(3, "pipeline")
    assert sigmas.tolist() == pytest.approx([1.0, second, 0.02, 0.0], abs=2e-5)


def test_a_size_that_does_not_pack_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="size = 18: accepted are multiples of 4, such as 16 or 20"):
        QwenImage(tiny()["qwen-image"].build(), size=18)


def test_a_longer_text_than_the_pipeline_takes_is_refused():
    with pytest.raises(ValueError, match=r"max_sequence_length = 1025: QwenImagePipeline accepts up to 1024\."):
        QwenImage(tiny()["qwen-image"].build(), size=16, max_sequence_length=1025)


def test_prompts_are_counted_without_the_template(policy_of):
    policy = policy_of("qwen-image", max_sequence_length=8)
    assert policy.warnings([Example("!" * 8), Example("!" * 9)]) == [
        "1 of 2 prompts exceed the tokenizer's 8 tokens; cut there. First: '!!!!!!!!!'"
    ]
    policy.encode([Example("!" * 9)])
    assert [len(text["tokens"]) for _, text in policy._texts.items()] == [8]


@pytest.mark.parametrize("train", ["lora", "full"])
def test_what_the_last_block_drops_is_not_trained_and_the_rest_is(policy_of, saved, tmp_path, train):
    """Its text has no reader: to_add_out and txt_mlp, in adapters of rank 4 and in all weights."""
    policy = policy_of("qwen-image", train=train)
    dropped = ("transformer_blocks.1.attn.to_add_out", "transformer_blocks.1.txt_mlp")
    names = [name for name, _ in policy.trainable()]
    assert not any(name.startswith(dropped) for name in names)
    assert any(name.startswith("transformer_blocks.0.txt_mlp") for name in names)
    policy.velocity(torch.randn(2, 4, 8, 8), torch.full((2,), 0.5), policy.encode(TWO)).square().sum().backward()
    assert [name for name, p in policy.trainable() if p.grad is None] == []
    if train == "lora":
        assert len(lora_weights(policy.pipe.transformer)) == 2 * (12 + 9)
