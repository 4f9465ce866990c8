"""Wan: one block, videos of five frames and 32 pixels in latents of two frames and 4 x 4."""

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

from tiny_pipelines import Tiny, seeded

WORDS = ("a", "red", "circle", "two", "blue", "squares", "on", "the", "left", "of", "green", "cross")
UNI = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "num_train_timesteps": 1000}


def t5_tokenizer():
    """One token per word, and an end."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    return T5Tokenizer(vocab=special + [(f"▁{word}", -3.0) for word in WORDS], extra_ids=0)


def network(channels):
    return WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=channels, out_channels=channels, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=1, rope_max_seq_len=32,
    )  # fmt: skip


def autoencoder(**parts):
    return AutoencoderKLWan(base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **parts)


def small_autoencoder_of_5b():
    """16 pixels to a latent: the last two by patches of 2."""
    channels = 12
    return autoencoder(
        z_dim=channels, is_residual=True, patch_size=2, in_channels=12, out_channels=12, scale_factor_spatial=16,
        latents_mean=torch.linspace(-1, 1, channels).tolist(), latents_std=torch.linspace(0.5, 2, channels).tolist(),
    )  # fmt: skip


def pipeline(*, vae=autoencoder, scheduler=None, experts=1, **settings):
    tokenizer, vae = t5_tokenizer(), vae()
    text = UMT5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.3
    )
    networks = [network(vae.config.z_dim) for _ in range(experts)]
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=UMT5EncoderModel(text),
        vae=vae,
        scheduler=scheduler or UniPCMultistepScheduler(flow_shift=3.0, **UNI),
        transformer=networks[0],
        transformer_2=networks[1] if experts == 2 else None,
        **settings,
    )


def variant(frames=5, sizes=((32, 32), (32, 48)), **parts):
    settings = {"max_sequence_length": 12, "frames": frames}
    return Tiny(seeded(lambda: pipeline(**parts)), sizes=sizes, settings=settings)


VARIANTS = {
    "wan2.1": variant(),
    "wan2.2": variant(experts=2, boundary_ratio=0.875),
    "wan2.2-5b": variant(vae=small_autoencoder_of_5b, expand_timesteps=True, sizes=((32, 32), (32, 64))),
    "wan-image": variant(frames=1, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0)),
}
