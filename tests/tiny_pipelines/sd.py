"""Stable Diffusion 1.5, and 2 with v prediction: a UNet of two levels, 8 x 8 latents of four channels."""

from diffusers import AutoencoderKL, DDIMScheduler, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel

from tiny_pipelines import Tiny, seeded
from tiny_pipelines.texts_vp import WIDTH, clip, clip_tokenizer

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SAVED = {"steps_offset": 1, "set_alpha_to_one": False}  # as the checkpoints' schedulers


def unet(**parts):
    return UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        **{"sample_size": 8, "cross_attention_dim": WIDTH} | parts,
    )  # fmt: skip


def vae(**parts):
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=2,
        block_out_channels=(4, 8), latent_channels=4, sample_size=16, **parts,
    )  # fmt: skip


def pipeline(scheduler):
    return StableDiffusionPipeline(
        vae=vae(), text_encoder=clip(), tokenizer=clip_tokenizer(), unet=unet(), scheduler=scheduler,
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def first():
    return pipeline(PNDMScheduler(**BETAS, **SAVED, skip_prk_steps=True))


def second():
    return pipeline(DDIMScheduler(**BETAS, **SAVED, prediction_type="v_prediction", clip_sample=False))


SIZES = ((16, 16), (24, 16))
VARIANTS = {"sd1.5": Tiny(seeded(first), SIZES), "sd2-v": Tiny(seeded(second), SIZES)}
