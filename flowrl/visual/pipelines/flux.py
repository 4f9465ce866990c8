"""FLUX.1 dev and schnell: no paper; the pipeline of diffusers is the source."""

import torch
from torch import Tensor

from flowrl.visual.pipelines import grids
from flowrl.visual.pipelines.family import Family, stacked


class Flux(Family):
    """Rectified flow over 2 x 2 patches of latents, packed for the network and unpacked outside.

    dev reads guidance as an input, pipe(guidance_scale=...), at 1 too. A network without that input is guided by a pair
    of rows, pipe(true_cfg_scale=..., negative_prompt=...).
    """

    PIPELINE = "FluxPipeline"
    TARGETS = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    )  # Flow-GRPO's
    BLOCKS = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
    TOKENS = 512
    GRIDS = ("pipeline",)  # which is linspace(1, 1/steps, steps), shifted once

    def shape(self):
        scale = self.pipe.vae_scale_factor
        return self.pipe.transformer.config.in_channels // 4, self.height // scale, self.width // scale

    def longest(self):
        return 512

    def encode(self, text, pictures, device):
        tokens, pooled, _ = self.pipe.encode_prompt(
            prompt=[text], prompt_2=None, device=device, max_sequence_length=self.max_sequence_length
        )
        return {"tokens": tokens[0], "pooled": pooled[0]}

    def blank(self):
        config = self.pipe.transformer.config
        shapes = {"tokens": (self.max_sequence_length, config.joint_attention_dim)}
        shapes |= {"pooled": (config.pooled_projection_dim,)}
        return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}

    def readers(self):
        """T5 alone: of CLIP only the pooled vector is used."""
        return [(self.pipe.tokenizer_2, self.max_sequence_length)]

    def sigmas(self, steps, grid):
        mu = grids.shift_by_tokens(self.pipe.scheduler.config, self.length(), most=1.15)
        return grids.walked(self.pipe.scheduler, steps, linear=True, mu=mu)

    def length(self) -> int:
        """Patches of one sample."""
        return (self.height // self.multiple()) * (self.width // self.multiple())

    def velocity(self, latents, sigma, texts, guidance):
        tokens, (patches, places) = stacked(texts, "tokens"), self.image_tokens(latents, texts)
        out = self.pipe.transformer(
            hidden_states=patches,
            timestep=sigma,  # the network multiplies by 1000 itself
            guidance=guidance,
            pooled_projections=stacked(texts, "pooled"),
            encoder_hidden_states=tokens,
            txt_ids=places.new_zeros(tokens.shape[1], 3),
            img_ids=places,
            return_dict=False,
        )[0]
        return self.pipe._unpack_latents(out[:, : self.length()], self.height, self.width, self.pipe.vae_scale_factor)

    def image_tokens(self, latents: Tensor, texts) -> tuple[Tensor, Tensor]:
        """Patches [B, N, 4 C], those of the sample first, and their places [N, 3], the same for every row."""
        return self.packed(latents)

    def packed(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Patches [B, h w / 4, 4 C] of latents [B, C, h, w], and their places [h w / 4, 3]: 0, row, column."""
        batch, channels, height, width = latents.shape
        places = latents.new_zeros(height // 2, width // 2, 3)  # made on the device: to copy is to wait for it
        places[..., 1] = torch.arange(height // 2, device=latents.device)[:, None]
        places[..., 2] = torch.arange(width // 2, device=latents.device)
        return self.pipe._pack_latents(latents, batch, channels, height, width), places.flatten(0, 1)

    def embeds_guidance(self):
        return self.pipe.transformer.config.guidance_embeds

    def decode(self, latents: Tensor) -> Tensor:
        config = self.pipe.vae.config
        return self.pipe.vae.decode(latents / config.scaling_factor + config.shift_factor, return_dict=False)[0]

    def draw(self, prompts, noise, steps, guidance, pictures):
        guided = {"guidance_scale": guidance}
        if not self.embeds_guidance():
            guided = {"true_cfg_scale": guidance, "negative_prompt": [""] * len(prompts)}
        return self.pipe(
            prompt=prompts, num_inference_steps=steps, height=self.height, width=self.width, output_type="pt",
            max_sequence_length=self.max_sequence_length, latents=self.pipe._pack_latents(noise, *noise.shape),
            **guided, **self.edited(pictures),
        ).images  # fmt: skip

    def edited(self, pictures) -> dict:
        """What pipe(...) is told of the pictures that condition it."""
        return {}
