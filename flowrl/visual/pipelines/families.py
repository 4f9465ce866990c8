"""Which adapter takes which class of diffusers' pipelines."""

from importlib import import_module

from flowrl.part import nearest
from flowrl.visual.pipelines.family import Family

TUTORIAL = "docs/new_model.md"
FAMILIES = {  # class of diffusers: module and class of its adapter, imported when it is asked for
    "Flux2KleinPipeline": ("flux2_klein", "Flux2Klein"),
    "FluxKontextPipeline": ("flux_kontext", "FluxKontext"),
    "FluxPipeline": ("flux", "Flux"),
    "PixArtSigmaPipeline": ("pixart", "PixArtSigma"),
    "QwenImageEditPlusPipeline": ("qwen_image_edit", "QwenImageEditPlus"),
    "QwenImagePipeline": ("qwen_image", "QwenImage"),
    "SanaPipeline": ("sana", "Sana"),
    "StableDiffusion3Pipeline": ("sd3", "StableDiffusion3"),
    "StableDiffusionPipeline": ("sd", "StableDiffusion"),
    "StableDiffusionXLPipeline": ("sdxl", "StableDiffusionXL"),
    "WanPipeline": ("wan", "Wan"),
    "ZImagePipeline": ("z_image", "ZImage"),
}


def find(pipeline: str, setting: str = "model", adapter: str | None = None) -> type[Family]:
    """The adapter of a pipeline class; ValueError with those there are.

    adapter: one's own, as my_package.my_file:MyFamily
    """
    if adapter is not None:
        return _own(adapter, pipeline)
    if pipeline not in FAMILIES:
        raise ValueError(
            f"{setting} is of class {pipeline}, for which there is no adapter. {nearest(pipeline, FAMILIES)}Accepted: "
            f"{', '.join(sorted(FAMILIES))}. Your own is named by model.adapter, see {TUTORIAL}."
        )
    module, name = FAMILIES[pipeline]
    return getattr(import_module(f"flowrl.visual.pipelines.{module}"), name)


def _own(address, pipeline):
    module, _, name = address.partition(":")
    try:
        family = getattr(import_module(module), name)
    except Exception as error:  # whatever a user's file raises while it is imported
        said = " ".join(str(error).split())
        raise ValueError(f"model.adapter = {address!r} cannot be imported: {type(error).__name__}: {said}") from error
    if not (isinstance(family, type) and issubclass(family, Family)) or pipeline != family.PIPELINE:
        raise ValueError(f"model.adapter = {address!r}: expected a subclass of Family whose PIPELINE is {pipeline!r}.")
    return family
