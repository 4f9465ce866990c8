"""Stable Diffusion 3 and 3.5.  arXiv:2403.03206"""

import torch
from torch import Tensor

from flowrl.visual.pipelines import grids
from flowrl.visual.pipelines.family import Family, stacked

ATTENTION = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")


class StableDiffusion3(Family):
    """The transformer takes timestep = 1000 * sigma and predicts the velocity; without T5 its tokens are zeros."""

    PIPELINE = "StableDiffusion3Pipeline"
    TARGETS = (*ATTENTION, "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out")  # Flow-GRPO's
    BLOCKS = ("JointTransformerBlock", "SD3SingleTransformerBlock")
    TOKENS = 256

    def multiple(self):
        return self.pipe.vae_scale_factor * self.pipe.transformer.config.patch_size

    def largest(self):
        return self.multiple() * self.pipe.transformer.config.pos_embed_max_size

    def shape(self):
        scale = self.pipe.vae_scale_factor
        return self.pipe.transformer.config.in_channels, self.height // scale, self.width // scale

    def longest(self):
        return 512

    def encode(self, text, pictures, device):
        tokens, _, pooled, _ = self.pipe.encode_prompt(
            prompt=[text], prompt_2=None, prompt_3=None, do_classifier_free_guidance=False, device=device,
            max_sequence_length=self.max_sequence_length,
        )  # fmt: skip
        return {"tokens": tokens[0], "pooled": pooled[0]}

    def blank(self):
        config = self.pipe.transformer.config
        tokens = self.pipe.text_encoder.config.max_position_embeddings + self.max_sequence_length
        shapes = {"tokens": (tokens, config.joint_attention_dim), "pooled": (config.pooled_projection_dim,)}
        return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}

    def readers(self):
        return [(self.pipe.tokenizer, self.pipe.tokenizer.model_max_length)]

    def sigmas(self, steps, grid):
        """The shift of SD3's scheduler counts twice in "pipeline", as in diffusers, and once in "linear"."""
        config, (_, height, width) = self.pipe.transformer.config, self.shape()
        tokens = (height // config.patch_size) * (width // config.patch_size)
        mu = grids.shift_by_tokens(self.pipe.scheduler.config, tokens, most=1.16)
        return grids.walked(self.pipe.scheduler, steps, linear=grid == "linear", mu=mu)

    def velocity(self, latents, sigma, texts, guidance):
        return self.pipe.transformer(
            hidden_states=latents,
            timestep=1000 * sigma,
            encoder_hidden_states=stacked(texts, "tokens"),
            pooled_projections=stacked(texts, "pooled"),
            return_dict=False,
        )[0]

    def decode(self, latents: Tensor) -> Tensor:
        config = self.pipe.vae.config
        return self.pipe.vae.decode(latents / config.scaling_factor + config.shift_factor, return_dict=False)[0]

    def draw(self, prompts, noise, steps, guidance, pictures):
        return self.pipe(
            prompt=prompts, negative_prompt=[""] * len(prompts), guidance_scale=guidance, num_inference_steps=steps,
            latents=noise, height=self.height, width=self.width, max_sequence_length=self.max_sequence_length,
            output_type="pt",
        ).images  # fmt: skip
