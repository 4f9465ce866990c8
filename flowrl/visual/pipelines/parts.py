"""The components of a loaded pipeline."""

import inspect
from collections.abc import Sequence

import torch
from diffusers import DiffusionPipeline, ModelMixin
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn


def modules(pipe: DiffusionPipeline) -> list[nn.Module]:
    """The networks among its components."""
    return [module for module in pipe.components.values() if isinstance(module, nn.Module)]


def networks(pipe: DiffusionPipeline, names: Sequence[str]) -> dict[str, nn.Module]:
    """Those of its components that are there."""
    return {name: found for name in names if (found := getattr(pipe, name, None)) is not None}


def numbers(pipe: DiffusionPipeline) -> dict[str, object]:
    """What its class was given beside components, such as Wan's boundary_ratio."""
    accepted = inspect.signature(type(pipe).__init__).parameters.keys() - pipe.components.keys()
    return {name: pipe.config[name] for name in accepted if name in pipe.config}


def thaw(network: nn.Module, unread: Sequence[str]) -> None:
    """Train all weights but those of the modules `unread`."""
    network.requires_grad_(True)
    for name in unread:
        network.get_submodule(name).requires_grad_(False)


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Change the dtype where it is another, but of what diffusers keeps in fp32 whenever it loads a model.

    Where nothing is to change nothing is called: diffusers warns of every cast.
    """
    if module.dtype != dtype:
        names = _in_fp32(module)
        kept = [(p, p.data.float()) for name, p in module.named_parameters() if names.intersection(name.split("."))]
        module.to(dtype)
        for parameter, before in kept:
            parameter.data = before


def compute_under_autocast(network: nn.Module, device: torch.device) -> None:
    """What diffusers keeps in fp32 computes in it, as it does in a pipeline; adapters leave casting to the autocast.

    By itself PEFT would keep a copy in fp32 of what goes into each adapter.
    """
    names = _in_fp32(network)
    for name, module in network.named_modules():
        if name.rpartition(".")[2] in names:
            module.forward = torch.autocast(device.type, enabled=False)(module.forward)
        if isinstance(module, BaseTunerLayer):
            module.cast_input_dtype_enabled = False


def compute_as_before(network: nn.Module) -> None:
    """Undo `compute_under_autocast`."""
    names = _in_fp32(network)
    for name, module in network.named_modules():
        if name.rpartition(".")[2] in names:
            module.__dict__.pop("forward", None)
        if isinstance(module, BaseTunerLayer):
            module.cast_input_dtype_enabled = True


def _in_fp32(module):
    """Parts of the names of such parameters and modules."""
    return set(module._keep_in_fp32_modules or () if isinstance(module, ModelMixin) else ())
