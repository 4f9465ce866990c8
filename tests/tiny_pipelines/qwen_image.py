"""Qwen-Image: two blocks, 8 x 8 latents of four channels, pictures of 16."""

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)

from tiny_pipelines import Tiny, seeded
from tiny_pipelines.texts_qwen import WIDTH, qwen_vl, tokenizer

SCHEDULE = {  # Qwen-Image's own
    "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9, "base_image_seq_len": 256,
    "max_image_seq_len": 8192, "shift_terminal": 0.02,
}  # fmt: skip


def parts(levels, **changes):
    """All but tokenizers; the autoencoder halves a side `levels` times."""
    transformer = QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=WIDTH, axes_dims_rope=(4, 2, 2), **changes,
    )  # fmt: skip
    vae = AutoencoderKLQwenImage(
        base_dim=4, z_dim=4, dim_mult=[1] * (levels + 1), num_res_blocks=1, temperal_downsample=[False] * levels,
        latents_mean=[0.1, -0.2, 0.3, -0.4], latents_std=[0.9, 1.1, 1.3, 1.5],
    )  # fmt: skip
    return {"transformer": transformer, "vae": vae, "scheduler": FlowMatchEulerDiscreteScheduler(**SCHEDULE)}


def pipeline():
    words = tokenizer()
    return QwenImagePipeline(**parts(1), text_encoder=qwen_vl(words), tokenizer=words)


VARIANTS = {"qwen-image": Tiny(seeded(pipeline), sizes=((16, 16), (12, 8)))}
