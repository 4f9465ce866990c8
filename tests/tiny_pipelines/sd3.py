"""Stable Diffusion 3 and 3.5: two blocks, 8 x 8 latents of four channels, pictures of 16."""

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from shapes_models import build_tokenizer
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from tiny_pipelines import Tiny, seeded


def pipeline(*, t5=False, dual=False, **schedule):
    text = CLIPTextConfig(
        vocab_size=len(build_tokenizer()), hidden_size=16, intermediate_size=32, projection_dim=16, bos_token_id=0,
        num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=10, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    encoders = [CLIPTextModelWithProjection(text) for _ in range(2)]
    third = T5Config(vocab_size=64, d_model=48, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.3)
    transformer = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=48, caption_projection_dim=32, pooled_projection_dim=32,
        pos_embed_max_size=8, qk_norm="rms_norm" if dual else None, dual_attention_layers=(0,) if dual else (),
    )  # fmt: skip
    torch.nn.init.normal_(transformer.proj_out.weight, std=0.2)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=2,
        block_out_channels=(4, 8), latent_channels=4, scaling_factor=1.5, shift_factor=0.06, sample_size=16,
        use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    return StableDiffusion3Pipeline(
        transformer=transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(**schedule),
        text_encoder=encoders[0],
        tokenizer=build_tokenizer(),
        text_encoder_2=encoders[1],
        tokenizer_2=build_tokenizer(),
        text_encoder_3=T5EncoderModel(third) if t5 else None,
        tokenizer_3=build_tokenizer() if t5 else None,
    )


def variant(**parts):
    return Tiny(seeded(lambda: pipeline(**parts)), sizes=((16, 16), (12, 8)), settings={"max_sequence_length": 4})


VARIANTS = {"sd3": variant(t5=True, shift=3.0), "sd3.5": variant(t5=True, dual=True, shift=3.0)}
