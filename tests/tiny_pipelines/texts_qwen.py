"""Qwen's tokenizer and text encoders: a token per word of the pipelines' templates, and bytes for the rest."""

from diffusers import QwenImageEditPlusPipeline, QwenImagePipeline
from transformers import (
    AddedToken,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3Config,
    Qwen3Model,
)

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT = (  # as Qwen3's: without thinking, the answer begins with an empty thought
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
WIDTH = 16


def tokenizer() -> Qwen2Tokenizer:
    """The templates take as many tokens as with Qwen's own vocabulary, so the pipelines drop the same start of them."""
    kinds = (QwenImagePipeline, QwenImageEditPlusPipeline)
    texts = [kind(*[None] * n).prompt_template_encode for kind, n in zip(kinds, (5, 6), strict=True)]
    trained = Qwen2Tokenizer().train_new_from_iterator([*texts, "Picture 1: 2: 3: 4:"], vocab_size=1000)
    trained.add_tokens([AddedToken(token, special=True) for token in SPECIAL])
    trained.chat_template = CHAT
    return trained


def qwen3(words: Qwen2Tokenizer) -> Qwen3Model:
    config = Qwen3Config(
        vocab_size=len(words), hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Qwen3Model(config)


def qwen_vl(words: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    text = dict(
        vocab_size=len(words), hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.3, bos_token_id=None, eos_token_id=None,
        rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6},
    )  # fmt: skip
    vision = dict(
        depth=1, hidden_size=16, intermediate_size=32, num_heads=2, out_hidden_size=WIDTH, fullatt_block_indexes=[0],
        initializer_range=0.3,
    )  # fmt: skip
    names = {"vision_start": "vision_start", "vision_end": "vision_end", "image": "image_pad", "video": "video_pad"}
    ids = {f"{name}_token_id": words.convert_tokens_to_ids(f"<|{token}|>") for name, token in names.items()}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))


def processor(words: Qwen2Tokenizer) -> Qwen2VLProcessor:
    """Pictures in patches of 14 pixels, four of them a token."""
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(), tokenizer=words, video_processor=Qwen2VLVideoProcessor()
    )
