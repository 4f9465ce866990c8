"""PixArt-Sigma.  arXiv:2403.04692"""

import math

import torch

from flowrl.visual.pipelines.family import stacked
from flowrl.visual.pipelines.vp import VariancePreserving


class PixArtSigma(VariancePreserving):
    """A transformer that reads T5 through a mask and predicts epsilon, with its variance beside it, which DDIM ignores.

    Sizes are drawn as they are given: pipe(use_resolution_binning=False).
    """

    PIPELINE = "PixArtSigmaPipeline"
    TARGETS = ()  # diffusers' class takes no adapter
    BLOCKS = ("BasicTransformerBlock",)
    TOKENS = 300

    def multiple(self):
        return math.lcm(8, self.pipe.vae_scale_factor * self.pipe.transformer.config.patch_size)

    def encode(self, text, pictures, device):
        tokens, mask, _, _ = self.pipe.encode_prompt(
            text, do_classifier_free_guidance=False, device=device, clean_caption=True,
            max_sequence_length=self.max_sequence_length,
        )  # fmt: skip
        return {"tokens": tokens[0], "mask": mask[0]}

    def blank(self):
        tokens, width = self.max_sequence_length, self.pipe.transformer.config.caption_channels
        return {
            "tokens": torch.empty(tokens, width, device="meta"),
            "mask": torch.empty(tokens, dtype=torch.long, device="meta"),
        }

    def predict(self, latents, timestep, texts):
        out = self.pipe.transformer(
            latents,
            encoder_hidden_states=stacked(texts, "tokens"),
            encoder_attention_mask=stacked(texts, "mask"),
            timestep=timestep,
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            return_dict=False,
        )[0]
        return out[:, : latents.shape[1]]

    def asked(self):
        return {"use_resolution_binning": False, "max_sequence_length": self.max_sequence_length}
