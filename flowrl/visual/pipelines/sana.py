"""Sana and Sana 1.5.  arXiv:2410.10629"""

import inspect
import math

import torch
from torch import Tensor

from flowrl.visual.pipelines.family import Family, stacked


class Sana(Family):
    """Gemma reads a prompt after an instruction to enhance it, of which only the last token stays, and a negative
    prompt without.
    """

    PIPELINE = "SanaPipeline"
    TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
    BLOCKS = ("SanaTransformerBlock",)
    TOKENS = 300

    def default_size(self):
        side = self.pipe.transformer.config.sample_size * self.pipe.vae_scale_factor
        return side, side

    def multiple(self):
        return math.lcm(32, self.pipe.vae_scale_factor * self.pipe.transformer.config.patch_size)

    def shape(self):
        scale = self.pipe.vae_scale_factor
        return self.pipe.transformer.config.in_channels, self.height // scale, self.width // scale

    def encode(self, text, pictures, device):
        called = inspect.signature(type(self.pipe).__call__).parameters
        return self._encode(text, device, called["complex_human_instruction"].default)

    def encode_negative(self, text, pictures, device):
        return self._encode(text, device, None)

    def _encode(self, text, device, instruction):
        tokens, mask, _, _ = self.pipe.encode_prompt(
            prompt=[text], do_classifier_free_guidance=False, device=device, complex_human_instruction=instruction,
            max_sequence_length=self.max_sequence_length,
        )  # fmt: skip
        return {"tokens": tokens[0], "mask": mask[0]}

    def blank(self):
        tokens, width = self.max_sequence_length, self.pipe.transformer.config.caption_channels
        return {
            "tokens": torch.empty(tokens, width, device="meta"),
            "mask": torch.empty(tokens, dtype=torch.long, device="meta"),
        }

    def readers(self):
        """After an instruction, one token less is left than for a text alone."""
        return [(self.pipe.tokenizer, self.max_sequence_length - 1)]

    def velocity(self, latents, sigma, texts, guidance):
        out = self.pipe.transformer(
            hidden_states=latents,
            timestep=1000 * sigma * self.pipe.transformer.config.timestep_scale,
            encoder_hidden_states=stacked(texts, "tokens"),
            encoder_attention_mask=stacked(texts, "mask"),
            return_dict=False,
        )[0]
        return out[:, : latents.shape[1]]  # a network may predict its variance too

    def decode(self, latents: Tensor) -> Tensor:
        return self.pipe.vae.decode(latents / self.pipe.vae.config.scaling_factor, return_dict=False)[0]

    def draw(self, prompts, noise, steps, guidance, pictures):
        return self.pipe(
            prompt=prompts, negative_prompt=[""] * len(prompts), guidance_scale=guidance, num_inference_steps=steps,
            latents=noise, height=self.height, width=self.width, max_sequence_length=self.max_sequence_length,
            use_resolution_binning=False, output_type="pt",
        ).images  # fmt: skip
