"""FLUX.1 Kontext: pictures are encoded at one megapixel, so the autoencoder shrinks them by 64 on each side."""

from diffusers import FluxKontextPipeline

from tiny_pipelines.flux import DYNAMIC, variant

SIZES = ((256, 256), (384, 256))
EDITS = {"kind": FluxKontextPipeline, "levels": 7, "sizes": SIZES, "conditioned": True}

VARIANTS = {"flux-kontext": variant(embedded=True, guidance=(1.0, 2.5), **EDITS, **DYNAMIC)}
