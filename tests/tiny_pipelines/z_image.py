"""Z-Image: two blocks and a refiner of each stream, 8 x 8 latents of four channels, pictures of 16."""

from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

from tiny_pipelines import Tiny, seeded
from tiny_pipelines.texts_qwen import WIDTH, qwen3, tokenizer

TOKENS = 32  # of which the chat takes nine


def pipeline(**schedule):
    transformer = ZImageTransformer2DModel(
        in_channels=4, dim=16, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=WIDTH,
        axes_dims=[4, 2, 2], axes_lens=[80, 8, 8],
    )  # fmt: skip
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=2,
        block_out_channels=(4, 8), latent_channels=4, scaling_factor=0.3611, shift_factor=0.1159, sample_size=16,
        use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    words = tokenizer()
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**schedule),
        vae=vae,
        text_encoder=qwen3(words),
        tokenizer=words,
        transformer=transformer,
    )


VARIANTS = {
    "z-image": Tiny(
        seeded(lambda: pipeline(shift=6.0)), sizes=((16, 16), (12, 8)), settings={"max_sequence_length": TOKENS}
    )
}
