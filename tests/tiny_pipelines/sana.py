"""Sana: one block, 8 x 8 latents of four channels, pictures of 32."""

import inspect
import json
import string

from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel
from tokenizers import Tokenizer, models, trainers
from transformers import Gemma2Config, Gemma2Model, GemmaTokenizer

from tiny_pipelines import Tiny, seeded

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]


def gemma_tokenizer():
    """Byte pairs of the instruction's words and of all letters; a beginning and no end, as Gemma's."""
    instruction = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
    model = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    words = " ".join([*instruction, "a red circle", "two blue squares on the left of a green cross"]).split()
    model.train_from_iterator([*string.ascii_lowercase, *(f"{word}▁" for word in words), "\n"], trainer)
    trained = json.loads(model.to_str())["model"]
    merges = [tuple(pair) for pair in trained["merges"]]
    return GemmaTokenizer(vocab=trained["vocab"], merges=merges, add_bos_token=True)


def pipeline():
    tokenizer = gemma_tokenizer()
    text = Gemma2Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=512, query_pre_attn_scalar=8,
    )  # fmt: skip
    transformer = SanaTransformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, out_channels=4, num_layers=1, attention_head_dim=8,
        num_attention_heads=2, num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16,
        caption_channels=16, timestep_scale=0.5,
    )  # fmt: skip
    vae = AutoencoderDC(
        latent_channels=4, attention_head_dim=2, encoder_block_types=("ResBlock", "ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8), encoder_layers_per_block=(1, 1, 1), decoder_layers_per_block=(1, 1, 1),
        encoder_qkv_multiscales=((), (), (5,)), decoder_qkv_multiscales=((), (), (5,)), scaling_factor=0.41407,
    )  # fmt: skip
    scheduler = DPMSolverMultistepScheduler(
        use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0, algorithm_type="dpmsolver++"
    )
    return SanaPipeline(tokenizer, Gemma2Model(text), vae, transformer, scheduler)


VARIANTS = {"sana": Tiny(seeded(pipeline), sizes=((32, 32), (32, 64)), settings={"max_sequence_length": 12})}
