"""PixArt-Sigma: two blocks, 8 x 8 latents of four channels, and a variance predicted beside epsilon."""

from diffusers import DPMSolverMultistepScheduler, PixArtSigmaPipeline, PixArtTransformer2DModel

from tiny_pipelines import Tiny, seeded
from tiny_pipelines.sd import SIZES, vae
from tiny_pipelines.texts_vp import WIDTH, t5, t5_tokenizer

TOKENS = 12


def pipeline(timesteps=1200):
    """Of as many timesteps as 3 and 4 divide: elsewhere DDIM's own steps and timesteps are rounded apart."""
    transformer = PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, norm_num_groups=4,
        cross_attention_dim=16, sample_size=8, caption_channels=WIDTH, use_additional_conditions=False,
    )  # fmt: skip
    return PixArtSigmaPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=t5(),
        vae=vae(scaling_factor=0.13025),
        transformer=transformer,
        scheduler=DPMSolverMultistepScheduler(num_train_timesteps=timesteps, beta_end=20 / timesteps),
    )


VARIANTS = {"pixart": Tiny(seeded(pipeline), SIZES, settings={"max_sequence_length": TOKENS}, lora=False)}
