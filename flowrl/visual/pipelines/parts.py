"""The components of a loaded pipeline."""

import inspect
from collections.abc import Sequence

import torch
from diffusers import DiffusionPipeline, ModelMixin
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
        kept = [(p, p.data) for name, p in module.named_parameters() if _in_fp32(module).intersection(name.split("."))]
        module.to(dtype)
        for parameter, before in kept:
            parameter.data = before


def compute_in_fp32(network: nn.Module, device: torch.device) -> None:
    """What diffusers keeps in fp32 computes in it inside of an autocast, too, as it does in a pipeline."""
    for name, module in network.named_modules():
        if name.rpartition(".")[2] in _in_fp32(network):
            module.forward = torch.autocast(device.type, enabled=False)(module.forward)


def _in_fp32(module):
    """Parts of the names of such parameters and modules."""
    return set(module._keep_in_fp32_modules or () if isinstance(module, ModelMixin) else ())
