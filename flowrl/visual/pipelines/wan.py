"""Wan 2.1 and 2.2, text to video.  arXiv:2503.20314"""

import math

import torch
from torch import Tensor

from flowrl.visual.pipelines.family import Family, stacked


class Wan(Family):
    """Latents [C, 1 + (frames - 1) / 4, height / 8, width / 8]; the transformer takes timestep = 1000 * sigma.

    Wan 2.2 has an expert for each side of `boundary_ratio`: a row goes through its own alone, and the other one gets a
    gradient of zeros. `expand_timesteps` (5B) gives every token the same timestep, so that of the row is enough.
    """

    PIPELINE = "WanPipeline"
    NETWORKS = ("transformer", "transformer_2")
    TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
    BLOCKS = ("WanTransformerBlock",)
    TOKENS = 512
    FRAMES = 81
    GRIDS = ("pipeline",)

    def default_size(self):
        return 480, 832

    def multiple(self):
        return math.lcm(16, self.pipe.vae_scale_factor_spatial * self.pipe.transformer.config.patch_size[-1])

    def check_size(self):
        super().check_size()
        unit, given = self.pipe.vae_scale_factor_temporal, self.frames
        if given < 1 or given % unit != 1:
            near = dict.fromkeys(max(n, 0) * unit + 1 for n in ((given - 1) // unit, (given - 1) // unit + 1))
            raise ValueError(
                f"model.frames = {given}: accepted are 1 and multiples of {unit} plus 1, such as "
                f"{' or '.join(str(n) for n in near)}."
            )

    def shape(self):
        space, time = self.pipe.vae_scale_factor_spatial, self.pipe.vae_scale_factor_temporal
        frames = (self.frames - 1) // time + 1
        return self.pipe.transformer.config.in_channels, frames, self.height // space, self.width // space

    def encode(self, text, pictures, device):
        """Padded with zeros, which the network reads too."""
        tokens, _ = self.pipe.encode_prompt(
            prompt=[text], do_classifier_free_guidance=False, device=device,
            max_sequence_length=self.max_sequence_length,
        )  # fmt: skip
        return {"tokens": tokens[0]}

    def blank(self):
        return {"tokens": torch.empty(self.max_sequence_length, self.pipe.transformer.config.text_dim, device="meta")}

    def velocity(self, latents, sigma, texts, guidance):
        timestep, tokens = 1000 * sigma, stacked(texts, "tokens")
        if self.pipe.config.boundary_ratio is None or sigma.is_meta:  # without a level the first stands for both
            return _draw(self.pipe.transformer, latents, timestep, tokens)
        noisy = self.noisy(sigma).cpu()  # the one wait of a call, before any network runs
        rows = [own.nonzero()[:, 0].to(latents.device) for own in (noisy, ~noisy)]
        found, places, unused = [], [], 0.0
        for expert, at in zip((self.pipe.transformer, self.pipe.transformer_2), rows, strict=True):
            if len(at):
                found.append(_draw(expert, latents[at], timestep[at], tokens[at]))
                places.append(at)
            elif self.sharded:  # other processes may have rows of it, and wait for its weights
                unused = 0 * _draw(expert, latents[:1], timestep[:1], tokens[:1]).sum()
            elif torch.is_grad_enabled():
                unused = 0 * sum(p.sum() for p in expert.parameters() if p.requires_grad)
        return torch.cat(found)[torch.cat(places).argsort()] + unused

    def noisy(self, sigma: Tensor) -> Tensor:
        """[B] bool: which levels belong to the first of two experts."""
        return 1000 * sigma >= 1000 * self.pipe.config.boundary_ratio

    def two_scales(self):
        return self.pipe.config.boundary_ratio is not None

    def scale(self, guidance, sigma):
        if self.guidance_2 is None:
            return guidance
        return sigma.new_full(sigma.shape, self.guidance_2).where(~self.noisy(sigma), guidance).view(-1, 1, 1, 1, 1)

    def decode(self, latents: Tensor) -> Tensor:
        config = self.pipe.vae.config
        mean, std = (latents.new_tensor(x).view(-1, 1, 1, 1) for x in (config.latents_mean, config.latents_std))
        return self.pipe.vae.decode(latents * std + mean, return_dict=False)[0]

    def draw(self, prompts, noise, steps, guidance, pictures):
        frames = self.pipe(
            prompt=prompts, negative_prompt=[""] * len(prompts), guidance_scale=guidance,
            guidance_scale_2=self.guidance_2, num_inference_steps=steps, latents=noise, height=self.height,
            width=self.width, num_frames=self.frames, max_sequence_length=self.max_sequence_length, output_type="pt",
        ).frames  # fmt: skip
        return frames if self.frames > 1 else frames[:, 0]


def _draw(network, latents, timestep, tokens):
    return network(hidden_states=latents, timestep=timestep, encoder_hidden_states=tokens, return_dict=False)[0]
