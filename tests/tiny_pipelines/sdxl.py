"""Stable Diffusion XL: the UNet of Stable Diffusion, two CLIPs, and a pooled text beside the size."""

from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

from tiny_pipelines import Tiny, seeded
from tiny_pipelines.sd import BETAS, SIZES, unet, vae
from tiny_pipelines.texts_vp import WIDTH, clip, clip_tokenizer


def pipeline(**settings):
    network = unet(
        cross_attention_dim=2 * WIDTH, addition_embed_type="text_time", addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=WIDTH + 6 * 4,
    )  # fmt: skip
    return StableDiffusionXLPipeline(
        vae=vae(scaling_factor=0.13025), text_encoder=clip(), text_encoder_2=clip(projected=True),
        tokenizer=clip_tokenizer(), tokenizer_2=clip_tokenizer(), unet=network,
        scheduler=EulerDiscreteScheduler(**BETAS, steps_offset=1, timestep_spacing="leading"), **settings,
    )  # fmt: skip


VARIANTS = {"sdxl": Tiny(seeded(pipeline), SIZES)}
