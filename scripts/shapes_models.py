"""The parts of the embedded pipeline: tokenizer, text encoders, autoencoder, transformer, and how they fit together.

StableDiffusion3Pipeline without T5 appends `max_sequence_length` zero tokens to the text.  They have no position,
so they stay equal through all blocks, and n of them act as one whose attention logit is raised by log(n):
`ZeroTokenProcessor` trains every n at the price of one token.
"""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderTiny,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from jaxtyping import Float, Int
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, PreTrainedTokenizerFast

from rewards.shapes_world import COLORS, COUNTS, GLYPHS, PLURALS, RELATIONS, SHAPES

SPECIAL = ("<bos>", "<eos>", "<unk>")
GRAMMAR = ("a", "an", "and", "the", "number", "in")
MAX_TOKENS = 10  # the longest prompt, "a red circle left of a red square", with both ends
TEXT_WIDTH = 64  # of each of the two text encoders
WIDTH, HEADS, LAYERS = 128, 4, 6  # of the transformer
LATENT_CHANNELS, LATENT_SIZE, PATCH = 4, 8, 2
AUTOENCODER_CHANNELS = (24, 24, 24)  # AutoencoderTiny keeps the channels within a level equal


def vocabulary() -> list[str]:
    """Every token; its index is its id."""
    words = [*GRAMMAR, *(word for relation in RELATIONS for word in relation.split()), *COUNTS.values(), *COLORS]
    return list(dict.fromkeys([*SPECIAL, *words, *SHAPES, *PLURALS.values(), *GLYPHS]))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word and per digit, lower case; an unknown word is <unk>, and padding is <eos>."""
    ids = {word: i for i, word in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[(word, ids[word]) for word in ("<bos>", "<eos>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        pad_token="<eos>",
        model_max_length=MAX_TOKENS,
        padding_side="right",
    )


def token_ids(tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> Int[Tensor, "N L"]:
    """Ids as the pipeline makes them: padded and truncated to MAX_TOKENS."""
    batch = tokenizer(prompts, padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt")
    return batch.input_ids


def build_text_encoder() -> CLIPTextModelWithProjection:
    """Two layers; CLIP pools at the first <eos>, which the config must name."""
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(vocabulary()),
            hidden_size=TEXT_WIDTH,
            intermediate_size=4 * TEXT_WIDTH,
            projection_dim=TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=MAX_TOKENS,
            hidden_act="gelu",
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    )


def build_autoencoder() -> AutoencoderTiny:
    """32x32 pictures in [-1, 1] to 8x8 latents of four channels."""
    return AutoencoderTiny(
        encoder_block_out_channels=AUTOENCODER_CHANNELS,
        decoder_block_out_channels=AUTOENCODER_CHANNELS,
        num_encoder_blocks=(0, 1, 2),
        num_decoder_blocks=(2, 1, 1),
        latent_channels=LATENT_CHANNELS,
    )


def build_transformer() -> SD3Transformer2DModel:
    """16 latent tokens; about 3.5 million parameters."""
    return SD3Transformer2DModel(
        sample_size=LATENT_SIZE,
        patch_size=PATCH,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=LAYERS,
        attention_head_dim=WIDTH // HEADS,
        num_attention_heads=HEADS,
        joint_attention_dim=2 * TEXT_WIDTH,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=2 * TEXT_WIDTH,
        pos_embed_max_size=LATENT_SIZE // PATCH,
        qk_norm="rms_norm",
    )


class TextToVelocity(nn.Module):
    """The transformer and its two text encoders, trained together."""

    def __init__(self):
        super().__init__()
        self.transformer = build_transformer()
        self.text_encoder = build_text_encoder()
        self.text_encoder_2 = build_text_encoder()
        self.transformer.set_attn_processor(ZeroTokenProcessor())

    def forward(
        self,
        latents: Float[Tensor, "B C H W"],
        sigma: Float[Tensor, " B"],
        ids: Int[Tensor, "B L"],
        num_zero_tokens: Float[Tensor, " B"],
    ) -> Float[Tensor, "B C H W"]:
        """Velocity noise - data at noise level sigma in [0, 1], as with num_zero_tokens zeros after the text."""
        first = self.text_encoder(ids, output_hidden_states=True)
        second = self.text_encoder_2(ids, output_hidden_states=True)
        context = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], -1)
        return self.transformer(
            hidden_states=latents,
            encoder_hidden_states=pad(context, (0, 0, 0, 1)),
            pooled_projections=torch.cat([first.text_embeds, second.text_embeds], -1),
            timestep=1000 * sigma,
            joint_attention_kwargs={"last_key_bias": num_zero_tokens.log()},
            return_dict=False,
        )[0]


class ZeroTokenProcessor:
    """SD3's joint attention with a bias [B] on the last key's logit; log(n) makes that key count as n equal keys."""

    def __call__(self, attn, hidden_states, encoder_hidden_states, last_key_bias, attention_mask=None):
        def heads(tokens: Tensor) -> Tensor:
            return tokens.unflatten(-1, (attn.heads, -1)).transpose(1, 2)

        query = attn.norm_q(heads(attn.to_q(hidden_states)))
        key = attn.norm_k(heads(attn.to_k(hidden_states)))
        text_query = attn.norm_added_q(heads(attn.add_q_proj(encoder_hidden_states)))
        text_key = attn.norm_added_k(heads(attn.add_k_proj(encoder_hidden_states)))
        query, key = torch.cat([query, text_query], 2), torch.cat([key, text_key], 2)
        value = torch.cat([heads(attn.to_v(hidden_states)), heads(attn.add_v_proj(encoder_hidden_states))], 2)
        bias = pad(last_key_bias.to(query.dtype).view(-1, 1, 1, 1), (key.shape[2] - 1, 0))
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=bias).transpose(1, 2).flatten(2)
        image, text = mixed.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], 1)
        if not attn.context_pre_only:
            text = attn.to_add_out(text)
        return attn.to_out[1](attn.to_out[0](image)), text


def build_pipeline(network: TextToVelocity, autoencoder: AutoencoderTiny) -> StableDiffusion3Pipeline:
    """The trained parts as diffusers knows them, with its own attention processor."""
    transformer = build_transformer()
    transformer.load_state_dict(network.transformer.state_dict())
    tokenizer = build_tokenizer()
    return StableDiffusion3Pipeline(
        transformer=transformer,
        vae=autoencoder,
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0),
        text_encoder=network.text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=network.text_encoder_2,
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )


def save_pipeline(pipeline: StableDiffusion3Pipeline, folder: Path) -> None:
    """Save in bf16, with the tokenizer under its documented name: transformers 5 writes that of its base class."""
    pipeline.to(torch.bfloat16).save_pretrained(folder)
    for path in (folder / "model_index.json", *folder.glob("tokenizer*/tokenizer_config.json")):
        path.write_text(path.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))


def load_pipeline(folder: str) -> StableDiffusion3Pipeline:
    """The saved pipeline in fp32; diffusers wants the missing T5 named."""
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        folder, text_encoder_3=None, tokenizer_3=None, dtype=torch.float32
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
