"""FLUX.1 dev, schnell and Kontext: one block of each kind, latents of four channels."""

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from tokenizers import pre_tokenizers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5TokenizerFast

from tiny_pipelines import Tiny, seeded

LENGTH = 8  # of T5
DYNAMIC = {"use_dynamic_shifting": True, "shift": 3.0}


def clip_tokenizer():
    """A token per letter, the last of a word apart."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    return CLIPTokenizer({word: i for i, word in enumerate(words)}, [], model_max_length=12)


def t5_tokenizer():
    """A token per word of the tests' prompts, and letters for the rest."""
    words = ["a", "red", "circle", "two", "blue", "squares", "on", "the", "left", "of", "green", "cross"]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0)]
    pieces += [(f"▁{word}", -1.0) for word in words] + [(letter, -5.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    return T5TokenizerFast(pieces, extra_ids=0)


def pipeline(kind=FluxPipeline, *, embedded, levels=2, **schedule):
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    text = CLIPTextConfig(
        vocab_size=len(clip), hidden_size=16, intermediate_size=32, projection_dim=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=12, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    words = T5Config(vocab_size=len(t5), d_model=24, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.3)
    transformer = FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, pooled_projection_dim=16, guidance_embeds=embedded, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    torch.nn.init.normal_(transformer.proj_out.weight, std=0.2)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels, up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(4,) * levels, layers_per_block=0, norm_num_groups=2, latent_channels=4, sample_size=16,
        scaling_factor=0.4, shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    return kind(
        transformer=transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(**schedule),
        text_encoder=CLIPTextModel(text),
        tokenizer=clip,
        text_encoder_2=T5EncoderModel(words),
        tokenizer_2=t5,
    )


def variant(*, sizes=((16, 16), (12, 8)), guidance=(1.0, 3.5), conditioned=False, **parts):
    return Tiny(
        seeded(lambda: pipeline(**parts)), sizes=sizes, guidance=guidance, conditioned=conditioned,
        settings={"max_sequence_length": LENGTH},
    )  # fmt: skip


VARIANTS = {
    "flux-dev": variant(embedded=True, **DYNAMIC),
    "flux-schnell": variant(embedded=False, guidance=(1.0, 4.0), shift=1.0),
}
