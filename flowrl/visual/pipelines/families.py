"""Which adapter takes which class of diffusers' pipelines."""

from importlib import import_module

from flowrl.part import nearest
from flowrl.visual.pipelines.family import Family

TUTORIAL = "docs/new_model.md"
FAMILIES = {  # class of diffusers: module and class of its adapter, imported when it is asked for
    "PixArtSigmaPipeline": ("pixart", "PixArtSigma"),
    "StableDiffusion3Pipeline": ("sd3", "StableDiffusion3"),
    "StableDiffusionPipeline": ("sd", "StableDiffusion"),
    "StableDiffusionXLPipeline": ("sdxl", "StableDiffusionXL"),
}


def find(pipeline: str, setting: str = "model") -> type[Family]:
    """The adapter of a pipeline class; ValueError with those there are."""
    if pipeline not in FAMILIES:
        raise ValueError(
            f"{setting} is of class {pipeline}, for which there is no adapter. {nearest(pipeline, FAMILIES)}Accepted: "
            f"{', '.join(sorted(FAMILIES))}. Another takes about 100 lines: {TUTORIAL}."
        )
    module, name = FAMILIES[pipeline]
    return getattr(import_module(f"flowrl.visual.pipelines.{module}"), name)
