"""A diffusers pipeline to train: opened from a folder or given, checked, in its dtypes and its place."""

from pathlib import Path

import diffusers
import torch

from flowrl.visual.pipelines import execution, families
from flowrl.visual.pipelines.family import Family
from flowrl.visual.pipelines.folders import quiet, read_index
from flowrl.visual.pipelines.parts import cast, modules, networks
from flowrl.visual.pipelines.policy import PipelinePolicy

DTYPES = (torch.float32, torch.bfloat16)
DRAWN = ("size", "frames", "max_sequence_length", "guidance_2")  # settings of a family; the others are the policy's


def load(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    rank: int,
    adapter: str | None = None,
    sharded: bool = False,
    quantize: str | None = None,
    **settings,
) -> PipelinePolicy:
    """Policy over the pipeline saved in the folder `path`.

    adapter:  see families.find
    sharded:  leave the networks on the CPU, for `distribute` to share out
    quantize: see flowrl.visual.pipelines.execution.QUANTIZED
    """
    if quantize and (sharded or not rank):
        raise ValueError(
            f"model.quantize = {quantize}: quantised weights are frozen, and whole on every process. Accepted with it "
            "are model.train = lora and processes without FSDP."
        )
    if quantize and device.type == "cpu" and not quantize.startswith("torchao"):
        raise ValueError(f"model.quantize = {quantize} needs a GPU. Accepted here: torchao_8bit.")
    settings["quantized"] = quantize is not None
    family = family_of(Path(path), adapter)
    pipe = opened(Path(path), family, dtype, full=not rank, quantize=quantize)
    return _policy(pipe, family, device, sharded, dtype=dtype, rank=rank, vae_dtype=dtype, **settings)


def adopt(
    pipe: object,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    adapter: str | None = None,
    sharded: bool = False,
    quantize: str | None = None,
    **settings,
) -> PipelinePolicy:
    """Policy over a pipeline that is loaded already, in a dtype or in that of its networks."""
    if quantize is not None:
        raise ValueError(f"model.quantize = {quantize} has no effect on a loaded pipeline: load it quantised.")
    family = accept(pipe, adapter)
    own = next(iter(networks(pipe, family.NETWORKS).values())).dtype
    given(pipe, family, device, dtype)
    return _policy(pipe, family, device, sharded, dtype=dtype or own, vae_dtype=dtype, **settings)


def _policy(pipe, family, device, sharded, *, offload=False, **settings):
    trained = networks(pipe, family.NETWORKS).values()
    for module in modules(pipe):
        if not (sharded if any(module is network for network in trained) else offload):
            module.to(device)
    drawn = {name: settings.pop(name) for name in DRAWN if name in settings}
    return PipelinePolicy(family(pipe, **drawn), device=device, offload=offload, **settings)


def family_of(path: Path, adapter: str | None = None) -> type[Family]:
    """The family of the pipeline saved in the folder `path`."""
    return families.find(read_index(path)["_class_name"], f"model.path = {str(path)!r}", adapter)


def opened(
    path: Path, family: type[Family], dtype: torch.dtype, full: bool, quantize: str | None = None
) -> diffusers.DiffusionPipeline:
    """The pipeline saved in the folder `path`, in dtype; what it was saved without stays away.

    full: the networks are trained and come in fp32, without a rounding on the way
    """
    index = read_index(path)
    quiet()
    more = {name: None for name, entry in index.items() if isinstance(entry, list) and entry[0] is None}
    dtypes = {name: torch.float32 for name in family.NETWORKS if full and name in index} | {"default": dtype}
    dtypes |= {"vae": torch.float32} if "vae" in index else {}  # in which it works, without a rounding on the way
    more |= {name: None for name in family.LEFT_OUT if name in index}
    if quantize:
        trained = [name for name in family.NETWORKS if name in index]
        more["quantization_config"] = execution.quantization(quantize, trained, dtype)
    try:
        pipe = family.pipeline().from_pretrained(path, dtype=dtypes, local_files_only=True, **more)
    except Exception as error:  # whatever a missing, truncated or foreign file raises
        said = " ".join(str(error).split())
        raise ValueError(f"model.path = {str(path)!r} cannot be loaded: {type(error).__name__}: {said}") from error
    check(dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def given(pipe: diffusers.DiffusionPipeline, family: type[Family], device: torch.device, dtype: torch.dtype | None):
    """Cast the encoders of a loaded pipeline to dtype; None: each part keeps its own."""
    trained = networks(pipe, family.NETWORKS).values()
    own = next(iter(trained)).dtype
    check(dtype or own)
    if dtype is None and own != torch.float32 and device.type == "cpu":
        raise ValueError(
            "the pipeline is in bfloat16, which is about 100 times slower than float32 on a CPU: load it in float32, "
            "or set model.dtype = float32."
        )
    for module in modules(pipe) if dtype else ():
        if not any(module is other for other in (*trained, getattr(pipe, "vae", None))):
            cast(module, dtype)


def accept(pipe: object, adapter: str | None = None) -> type[Family]:
    """The family of a loaded pipeline; ValueError unless training can take it over."""
    family = families.find(type(pipe).__name__, adapter=adapter)
    if hasattr(pipe, "get_list_adapters") and pipe.get_list_adapters():
        raise ValueError(
            f"the pipeline carries adapters already ({pipe.get_list_adapters()}): fuse them with pipe.fuse_lora() "
            "and pipe.unload_lora_weights(), or load the base alone."
        )
    hooked = [name for name, part in pipe.components.items() if hasattr(part, "_hf_hook")]
    if hooked or getattr(pipe, "hf_device_map", None):
        raise ValueError(
            f"the pipeline moves its parts by itself ({', '.join(hooked) or 'hf_device_map'}): load it without "
            "enable_model_cpu_offload or a device map, and set model.offload."
        )
    return family


def check(dtype: torch.dtype) -> None:
    """Refuse a dtype in which gradients would vanish."""
    if dtype not in DTYPES:
        raise ValueError(
            f"the pipeline is in {str(dtype).removeprefix('torch.')}: accepted are float32 and bfloat16, whose "
            "gradients need no loss scaling. Load it in one of them, or set model.dtype."
        )
