"""FLUX.2 klein: no paper; the pipeline of diffusers is the source."""

import torch
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

from flowrl.visual.pipelines import grids
from flowrl.visual.pipelines.family import Family, stacked


class Flux2Klein(Family):
    """Rectified flow over 2 x 2 patches of latents, normalised by the statistics of the autoencoder's batch norm.

    Latents are patches here as in the pipeline: [4 C, h / 2, w / 2]. Qwen3's tokens are padded to
    max_sequence_length, and the network reads the padding. What was distilled to few steps draws without guidance.
    """

    PIPELINE = "Flux2KleinPipeline"
    TARGETS = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *("ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out", "attn.to_qkv_mlp_proj"),
    )  # Flow-Factory's
    BLOCKS = ("Flux2TransformerBlock", "Flux2SingleTransformerBlock")
    TOKENS = 512
    GRIDS = ("pipeline",)  # which is linspace(1, 1/steps, steps), shifted once

    def __init__(self, pipe, *drawn, **named):
        super().__init__(pipe, *drawn, **named)
        self.GUIDED = not pipe.config.is_distilled

    def shape(self):
        unit = self.multiple()
        return self.pipe.transformer.config.in_channels, self.height // unit, self.width // unit

    def encode(self, text, pictures, device):
        tokens, _ = self.pipe.encode_prompt([text], device=device, max_sequence_length=self.max_sequence_length)
        return {"tokens": tokens[0]}

    def blank(self):
        width = self.pipe.transformer.config.joint_attention_dim
        return {"tokens": torch.empty(self.max_sequence_length, width, device="meta")}

    def readers(self):
        """What the chat template adds counts too."""
        around = self.pipe.tokenizer.apply_chat_template(
            [{"role": "user", "content": ""}], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        added = len(self.pipe.tokenizer(around).input_ids)
        return [(self.pipe.tokenizer, self.max_sequence_length - added)]

    def sigmas(self, steps, grid):
        """The shift grows with the number of steps, up to 4300 tokens."""
        _, height, width = self.shape()
        mu = compute_empirical_mu(height * width, steps)
        return grids.walked(self.pipe.scheduler, steps, linear=True, mu=mu)

    def velocity(self, latents, sigma, texts, guidance):
        tokens = stacked(texts, "tokens")
        out = self.pipe.transformer(
            hidden_states=self.pipe._pack_latents(latents),
            timestep=sigma,  # the network multiplies by 1000 itself
            encoder_hidden_states=tokens,
            txt_ids=_places(latents.device, 1, 1, 1, tokens.shape[1]),
            img_ids=_places(latents.device, 1, *latents.shape[2:], 1),
            return_dict=False,
        )[0]
        return out.transpose(1, 2).unflatten(2, latents.shape[2:])

    def decode(self, latents):
        norm, eps = self.pipe.vae.bn, self.pipe.vae.config.batch_norm_eps
        mean, std = norm.running_mean.view(-1, 1, 1), (norm.running_var + eps).sqrt().view(-1, 1, 1)
        return self.pipe.vae.decode(self.pipe._unpatchify_latents(latents * std + mean), return_dict=False)[0]

    def draw(self, prompts, noise, steps, guidance, pictures):
        return self.pipe(
            prompt=prompts, guidance_scale=guidance, num_inference_steps=steps, latents=noise, height=self.height,
            width=self.width, max_sequence_length=self.max_sequence_length, output_type="pt",
        ).images  # fmt: skip


def _places(device, *counts):
    """[1, all, 4]: frame, row, column and token of each; made on the device, since to copy is to wait for it."""
    return torch.cartesian_prod(*(torch.arange(count, device=device) for count in counts))[None]
