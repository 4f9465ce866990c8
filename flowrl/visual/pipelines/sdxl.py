"""Stable Diffusion XL.  arXiv:2307.01952"""

import torch

from flowrl.visual.pipelines.family import stacked
from flowrl.visual.pipelines.sd import StableDiffusion


class StableDiffusionXL(StableDiffusion):
    """Two CLIPs, the pooled text of the second, and the size: time ids of an uncropped picture of the size drawn."""

    PIPELINE = "StableDiffusionXLPipeline"

    def encode(self, text, pictures, device):
        tokens, _, pooled, _ = self.pipe.encode_prompt(text, device=device, do_classifier_free_guidance=False)
        return {"tokens": tokens[0], "pooled": pooled[0]}

    def encode_negative(self, text, pictures, device):
        """Without a negative prompt, zeros where the pipeline's force_zeros_for_empty_prompt says so."""
        found = self.encode(text, pictures, device)
        zeros = not text and self.pipe.config.force_zeros_for_empty_prompt
        return {name: torch.zeros_like(x) for name, x in found.items()} if zeros else found

    def blank(self):
        pooled = torch.empty(self.pipe.text_encoder_2.config.projection_dim, device="meta")
        return super().blank() | {"pooled": pooled}

    def predict(self, latents, timestep, texts):
        numbers = (self.height, self.width, 0, 0, self.height, self.width)  # original size, crop, target size
        ids = torch.stack([torch.full_like(timestep, number) for number in numbers], 1)
        return self.pipe.unet(
            latents,
            timestep,
            encoder_hidden_states=stacked(texts, "tokens"),
            added_cond_kwargs={"text_embeds": stacked(texts, "pooled"), "time_ids": ids},
            return_dict=False,
        )[0]

    def decode(self, latents):
        config = self.pipe.vae.config
        if config.latents_mean is None or config.latents_std is None:
            return super().decode(latents)
        mean, std = (latents.new_tensor(x).view(-1, 1, 1) for x in (config.latents_mean, config.latents_std))
        return self.pipe.vae.decode(latents * std / config.scaling_factor + mean, return_dict=False)[0]
