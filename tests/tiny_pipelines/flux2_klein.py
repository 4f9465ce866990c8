"""FLUX.2 klein: one block of each kind; Qwen3 has the 27 layers of which the pipeline reads three."""

import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Transformer2DModel
from tokenizers import pre_tokenizers
from transformers import Qwen2TokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tiny_pipelines import Tiny, seeded

LENGTH = 96  # of Qwen3, whose tokenizer here knows letters and the marks of its template
TEMPLATE = (  # Qwen3's, of one message
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)


def qwen_tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    return Qwen2TokenizerFast(
        {word: i for i, word in enumerate([*letters, *marks])}, [], chat_template=TEMPLATE,
        additional_special_tokens=marks[1:], padding_side="right",
    )  # fmt: skip


def pipeline(distilled=False):
    tokenizer = qwen_tokenizer()
    words = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=16, num_hidden_layers=27, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, tie_word_embeddings=True,
    )  # fmt: skip
    transformer = Flux2Transformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, timestep_guidance_channels=32, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False,
    )  # fmt: skip
    torch.nn.init.normal_(transformer.proj_out.weight, std=0.2)
    vae = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=2,
        block_out_channels=(4, 8), layers_per_block=1, latent_channels=4, sample_size=16,
    )  # fmt: skip
    torch.nn.init.normal_(vae.bn.running_mean, std=0.3)
    torch.nn.init.uniform_(vae.bn.running_var, 0.5, 2.0)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return Flux2KleinPipeline(
        transformer=transformer, vae=vae, scheduler=scheduler, text_encoder=Qwen3ForCausalLM(words).eval(),
        tokenizer=tokenizer, is_distilled=distilled,
    )  # fmt: skip


VARIANTS = {
    "flux2-klein": Tiny(
        seeded(pipeline), sizes=((16, 16), (12, 8)), settings={"max_sequence_length": LENGTH},
    )
}  # fmt: skip
