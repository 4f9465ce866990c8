"""CLIP's and T5's tokenizers and encoders: a token per letter, and T5 one per word that it knows."""

import string

from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

WIDTH = 16
LONGEST = 77  # CLIP's


def clip_tokenizer() -> CLIPTokenizer:
    letters = string.ascii_lowercase + string.digits
    names = ("<|startoftext|>", "<|endoftext|>", *letters, *(f"{x}</w>" for x in letters))
    return CLIPTokenizer(vocab={name: i for i, name in enumerate(names)}, merges=[], model_max_length=LONGEST)


def clip(*, projected: bool = False) -> CLIPTextModel | CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(clip_tokenizer()), hidden_size=WIDTH, intermediate_size=32, projection_dim=WIDTH,
        num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=LONGEST, bos_token_id=0, eos_token_id=1,
        pad_token_id=1, initializer_range=0.3,
    )  # fmt: skip
    return (CLIPTextModelWithProjection if projected else CLIPTextModel)(config)


def t5_tokenizer() -> T5Tokenizer:
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    words = ["a", "red", "circle", "two", "blue", "squares", "on", "the", "left", "of", "green", "cross"]
    return T5Tokenizer(vocab=[*special, ("\u2581", -4.0), *((f"\u2581{word}", -2.0) for word in words)], extra_ids=0)


def t5() -> T5EncoderModel:
    config = T5Config(
        vocab_size=len(t5_tokenizer()), d_model=WIDTH, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.3
    )
    return T5EncoderModel(config)
