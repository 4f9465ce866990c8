"""Z-Image and its distilled Turbo.  arXiv:2511.22699"""

import torch

from flowrl.visual.pipelines import grids
from flowrl.visual.pipelines.family import Family

ATTENTION = ("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0")


class ZImage(Family):
    """The transformer takes lists of samples [C, 1, h, w] and of texts, and time 1 - sigma; it predicts data - noise.

    guidance: neg + g (pos - neg) as everywhere here, from g > 1 on. pipe(guidance_scale=w) draws pos + w (pos - neg)
              from w > 0 on: g = w + 1. Turbo's w = 0 is g = 1, pipe's own w = 5 is g = 6.
    """

    PIPELINE = "ZImagePipeline"
    TARGETS = (*ATTENTION, "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")  # Flow-Factory's
    BLOCKS = ("ZImageTransformerBlock",)
    TOKENS = 512
    MASKED = True
    GRIDS = ("pipeline",)  # which is linear before its shift

    def default_size(self):
        return 1024, 1024

    def largest(self):
        return self.multiple() * min(self.pipe.transformer.axes_lens[1:])  # places that its rotary embedding has

    def shape(self):
        scale = self.pipe.vae_scale_factor
        return self.pipe.transformer.in_channels, self.height // scale, self.width // scale

    def longest(self):
        """Texts fill up to a multiple of 32, from place 1 on, and the picture takes the place after them."""
        return (self.pipe.transformer.axes_lens[0] - 2) // 32 * 32

    def encode(self, text, pictures, device):
        tokens, _ = self.pipe.encode_prompt(
            [text], device=device, do_classifier_free_guidance=False, max_sequence_length=self.max_sequence_length
        )
        return {"tokens": tokens[0]}

    def blank(self):
        width = self.pipe.transformer.config.cap_feat_dim
        return {"tokens": torch.empty(self.max_sequence_length, width, device="meta")}

    def readers(self):
        """The chat around the prompt takes some of the tokens."""
        chat = self.pipe.tokenizer.apply_chat_template(
            [{"role": "user", "content": ""}], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        return [(self.pipe.tokenizer, self.max_sequence_length - len(self.pipe.tokenizer(chat).input_ids))]

    def sigmas(self, steps, grid):
        _, height, width = self.shape()
        mu = grids.shift_by_tokens(self.pipe.scheduler.config, height // 2 * (width // 2), most=1.15)
        return grids.walked(self.pipe.scheduler, steps, linear=True, mu=mu)

    def velocity(self, latents, sigma, texts, guidance):
        samples, tokens = list(latents.unsqueeze(2)), [text["tokens"] for text in texts]
        drawn = self.pipe.transformer(samples, 1 - sigma, tokens, return_dict=False)[0]
        return -torch.stack(drawn).squeeze(2)

    def decode(self, latents):
        config = self.pipe.vae.config
        return self.pipe.vae.decode(latents / config.scaling_factor + config.shift_factor, return_dict=False)[0]

    def draw(self, prompts, noise, steps, guidance, pictures):
        return self.pipe(
            prompt=list(prompts), negative_prompt=[""] * len(prompts), guidance_scale=guidance - 1, latents=noise,
            num_inference_steps=steps, height=self.height, width=self.width, output_type="pt",
            max_sequence_length=self.max_sequence_length,
        ).images  # fmt: skip
