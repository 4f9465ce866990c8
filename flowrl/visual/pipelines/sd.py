"""Stable Diffusion 1.x and 2.x.  arXiv:2112.10752"""

import torch

from flowrl.visual.pipelines.family import stacked
from flowrl.visual.pipelines.vp import VariancePreserving


class StableDiffusion(VariancePreserving):
    """A UNet that reads one CLIP; no safety checker looks at what it draws."""

    PIPELINE = "StableDiffusionPipeline"
    NETWORKS = ("unet",)
    TARGETS = ("to_q", "to_k", "to_v", "to_out.0")  # DDPO's, of self- and cross-attention
    BLOCKS = ("BasicTransformerBlock", "ResnetBlock2D")
    LEFT_OUT = ("safety_checker",)

    def __init__(self, pipe, *drawn, **named):
        super().__init__(pipe, *drawn, **named)
        if pipe.unet.config.time_cond_proj_dim is not None:
            raise ValueError(
                f"unet.time_cond_proj_dim = {pipe.unet.config.time_cond_proj_dim}: a UNet distilled to few steps with "
                "guidance as an input has no adapter; expected one without. Train the model that it was distilled from."
            )

    def encode(self, text, pictures, device):
        tokens, _ = self.pipe.encode_prompt(text, device, 1, do_classifier_free_guidance=False)
        return {"tokens": tokens[0]}

    def blank(self):
        tokens = self.pipe.text_encoder.config.max_position_embeddings
        return {"tokens": torch.empty(tokens, self.pipe.unet.config.cross_attention_dim, device="meta")}

    def predict(self, latents, timestep, texts):
        return self.pipe.unet(
            latents, timestep, encoder_hidden_states=stacked(texts, "tokens"), return_dict=False
        )[0]  # fmt: skip
