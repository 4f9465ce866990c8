"""A StableDiffusion3Pipeline to train: opened from a folder or given, checked, in its dtypes and its place."""

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from torch import nn

from flowrl.visual.pipelines.folders import quiet, read_index

DTYPES = (torch.float32, torch.bfloat16)


def opened(path: Path, dtype: torch.dtype, full: bool) -> StableDiffusion3Pipeline:
    """The pipeline saved in the folder `path`, in dtype; encoders that it was saved without stay away.

    full: the transformer is trained and comes in fp32, without a rounding on the way
    """
    index = read_index(path)
    quiet()
    absent = {name: None for name, entry in index.items() if isinstance(entry, list) and entry[0] is None}
    dtypes = {"transformer": torch.float32 if full else dtype, "default": dtype}
    try:
        pipe = StableDiffusion3Pipeline.from_pretrained(path, dtype=dtypes, local_files_only=True, **absent)
    except Exception as error:  # whatever a missing, truncated or foreign file raises
        said = " ".join(str(error).split())
        raise ValueError(f"model.path = {str(path)!r} cannot be loaded: {type(error).__name__}: {said}") from error
    check(pipe, dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def given(pipe: object, device: torch.device, dtype: torch.dtype | None) -> StableDiffusion3Pipeline:
    """A pipeline that is loaded already, all but its transformer cast to dtype; None: each part keeps its own."""
    accept(pipe)
    check(pipe, dtype or pipe.transformer.dtype)
    if dtype is None and pipe.transformer.dtype != torch.float32 and device.type == "cpu":
        raise ValueError(
            "the pipeline is in bfloat16, which is about 100 times slower than float32 on a CPU: load it in float32, "
            "or set model.dtype = float32."
        )
    for module in modules(pipe) if dtype else ():
        if module is not pipe.transformer:
            cast(module, dtype)
    return pipe


def accept(pipe: object) -> None:
    """ValueError unless this is a pipeline that training can take over."""
    if not isinstance(pipe, StableDiffusion3Pipeline):
        raise ValueError(
            f"model is a {type(pipe).__name__}: accepted is StableDiffusion3Pipeline, or the folder of one."
        )
    if pipe.get_list_adapters():
        raise ValueError(
            f"the pipeline carries adapters already ({pipe.get_list_adapters()}): fuse them with pipe.fuse_lora() "
            "and pipe.unload_lora_weights(), or load the base alone."
        )


def check(pipe: StableDiffusion3Pipeline, dtype: torch.dtype) -> None:
    """Refuse a pipeline that training could not follow, and a dtype in which gradients would vanish."""
    if dtype not in DTYPES:
        raise ValueError(
            f"the pipeline is in {str(dtype).removeprefix('torch.')}: accepted are float32 and bfloat16, whose "
            "gradients need no loss scaling. Load it in one of them, or set model.dtype."
        )
    if not isinstance(pipe.scheduler, FlowMatchEulerDiscreteScheduler):
        raise ValueError(
            f"scheduler {type(pipe.scheduler).__name__}: accepted is FlowMatchEulerDiscreteScheduler, whose sigmas "
            "are the flow's."
        )


def modules(pipe: StableDiffusion3Pipeline) -> list[nn.Module]:
    """The networks among its components."""
    return [module for module in pipe.components.values() if isinstance(module, nn.Module)]


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Change the dtype where it is another; diffusers warns of a cast even when it changes nothing."""
    if module.dtype != dtype:
        module.to(dtype)


def placed(pipe: StableDiffusion3Pipeline, device: torch.device, sharded: bool) -> StableDiffusion3Pipeline:
    """The pipeline on the device; the transformer stays where it is if it is to be sharded."""
    for module in modules(pipe):
        if not (sharded and module is pipe.transformer):
            module.to(device)
    return pipe


def side(pipe: StableDiffusion3Pipeline, size: int | None) -> int:
    """Pixels of a side that the transformer can draw; by default the pipeline's own."""
    pixels = size or pipe.default_sample_size * pipe.vae_scale_factor
    patch = pipe.vae_scale_factor * pipe.transformer.config.patch_size
    largest = patch * pipe.transformer.config.pos_embed_max_size
    if pixels % patch or pixels > largest:
        raise ValueError(f"model.size = {pixels}: accepted are multiples of {patch} up to {largest}.")
    return pixels
