"""Qwen-Image.  arXiv:2508.02324"""

import torch

from flowrl.visual.pipelines import grids
from flowrl.visual.pipelines.family import Family, stacked

ATTENTION = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
TEXT_ATTENTION = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out")
LAYERS = ("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")


class QwenImage(Family):
    """The transformer takes latents in packed 2 x 2 tokens, time sigma, and a mask where texts differ in length.

    guidance: pipe(true_cfg_scale=...), each token brought back to the length that it has without guidance
    """

    PIPELINE = "QwenImagePipeline"
    TARGETS = (*ATTENTION, *TEXT_ATTENTION, *LAYERS)  # Flow-GRPO's
    BLOCKS = ("QwenImageTransformerBlock",)
    TOKENS = 512
    MASKED = True
    GRIDS = ("pipeline",)  # which is linear before its shift

    @classmethod
    def unread(cls, network):
        """The text leaves the last block for nowhere."""
        last = f"transformer_blocks.{len(network.transformer_blocks) - 1}"
        return f"{last}.attn.to_add_out", f"{last}.txt_mlp"

    def shape(self):
        scale = self.pipe.vae_scale_factor
        return self.pipe.transformer.config.in_channels // 4, self.height // scale, self.width // scale

    def longest(self):
        return self.pipe.tokenizer_max_length

    def encode(self, text, pictures, device):
        tokens, _ = self.pipe.encode_prompt([text], device=device, max_sequence_length=self.max_sequence_length)
        return {"tokens": tokens[0], "mask": tokens.new_ones(tokens.shape[1], dtype=torch.bool)}

    def blank(self):
        tokens, width = self.max_sequence_length or 1024, self.pipe.transformer.config.joint_attention_dim
        return {
            "tokens": torch.empty(tokens, width, device="meta"),
            "mask": torch.empty(tokens, dtype=torch.bool, device="meta"),
        }

    def sigmas(self, steps, grid):
        _, height, width = self.shape()
        mu = grids.shift_by_tokens(self.pipe.scheduler.config, height // 2 * (width // 2), most=1.15)
        return grids.walked(self.pipe.scheduler, steps, linear=True, mu=mu)

    def packed(self, latents):
        """[B, C, h, w] as tokens [B, h/2 * w/2, 4 C]."""
        return self.pipe._pack_latents(latents, *latents.shape)

    def unpacked(self, tokens):
        """[B, C, h, w] of the size that is drawn."""
        return self.pipe._unpack_latents(tokens, self.height, self.width, self.pipe.vae_scale_factor).squeeze(2)

    def beside(self, texts):
        """Latents [B, C, h, w] that the transformer reads after those that it moves, of a size each."""
        return []

    def velocity(self, latents, sigma, texts, guidance):
        images = [latents, *self.beside(texts)]
        lengths = {len(text["tokens"]) for text in texts}
        drawn = self.pipe.transformer(
            hidden_states=torch.cat([self.packed(x.to(latents.dtype)) for x in images], 1),
            timestep=sigma,
            encoder_hidden_states=stacked(texts, "tokens"),
            encoder_hidden_states_mask=stacked(texts, "mask") if len(lengths) > 1 else None,
            img_shapes=[[(1, x.shape[2] // 2, x.shape[3] // 2) for x in images]] * len(latents),
            return_dict=False,
        )[0]
        return self.unpacked(drawn[:, : latents[0, 0].numel() // 4])

    def guide(self, negative, positive, scale):
        tokens = self.packed(super().guide(negative, positive, scale))
        length = self.packed(positive).norm(dim=-1, keepdim=True) / tokens.norm(dim=-1, keepdim=True)
        return self.unpacked(tokens * length)

    def decode(self, latents):
        config = self.pipe.vae.config
        mean, std = (latents.new_tensor(x).view(-1, 1, 1) for x in (config.latents_mean, config.latents_std))
        return self.pipe.vae.decode((latents * std + mean).unsqueeze(2), return_dict=False)[0][:, :, 0]

    def draw(self, prompts, noise, steps, guidance, pictures):
        return self.pipe(
            prompt=list(prompts), negative_prompt=[""] * len(prompts), true_cfg_scale=guidance,
            latents=self.packed(noise), num_inference_steps=steps, height=self.height, width=self.width,
            max_sequence_length=self.max_sequence_length, output_type="pt",
        ).images  # fmt: skip
