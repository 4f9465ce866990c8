"""FLUX.1 Kontext, which edits a picture.  arXiv:2506.15742"""

import torch
from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

from flowrl.visual.pipelines.family import stacked
from flowrl.visual.pipelines.flux import Flux


class FluxKontext(Flux):
    """FLUX.1 whose network reads the picture's latents as tokens after those of the sample, at first coordinate 1.

    The picture is resized to the preferred resolution of the nearest aspect ratio, about one megapixel, whatever is
    drawn. model.size is pipe(height=..., width=..., max_area=height * width).
    """

    PIPELINE = "FluxKontextPipeline"
    TARGETS = (*Flux.TARGETS, "proj_mlp")  # Flow-GRPO's
    CONDITIONED = True

    def encode(self, text, pictures, device):
        if len(pictures) != 1:
            raise ValueError(f"{self.PIPELINE} edits one picture: the prompt {text[:60]!a} comes with {len(pictures)}.")
        pixels = self.pipe.image_processor.preprocess(pictures[0], *self.resolution(pictures[0]))
        latents = self.pipe._encode_vae_image(pixels.to(device, self.pipe.vae.dtype), generator=None)
        encoded = super().encode(text, pictures, device)
        return encoded | {"picture": latents[0].to(encoded["tokens"].dtype)}

    def blank(self):
        megapixel = 1024 // self.pipe.vae_scale_factor
        channels = self.pipe.transformer.config.in_channels // 4
        return super().blank() | {"picture": torch.empty(channels, megapixel, megapixel, device="meta")}

    def resolution(self, picture) -> tuple[int, int]:
        """(height, width) at which a picture is encoded."""
        unit = self.multiple()
        height, width = self.pipe.image_processor.get_default_height_width(picture)
        if not height or not width:
            raise ValueError(
                f"a picture to edit has {picture.width} x {picture.height} pixels: expected {unit} or more each way."
            )
        by_distance = [(abs(width / height - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS]
        _, width, height = min(by_distance)
        return height // unit * unit, width // unit * unit

    def bucket(self, text):
        """The picture's size: the places of its tokens are the same for all rows of a call."""
        return tuple(text["picture"].shape)

    def image_tokens(self, latents, texts):
        patches, places = self.packed(latents)
        seen, seen_places = self.packed(stacked(texts, "picture").to(latents.dtype))
        seen_places[:, 0] = 1
        return torch.cat([patches, seen], dim=1), torch.cat([places, seen_places])

    def edited(self, pictures):
        return {"image": [picture for picture, *_ in pictures], "max_area": self.height * self.width}
