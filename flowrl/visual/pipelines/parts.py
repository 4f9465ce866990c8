"""The components of a loaded pipeline."""

import inspect
from collections.abc import Sequence

import torch
from diffusers import DiffusionPipeline
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
    """Change the dtype where it is another; diffusers warns of a cast even when it changes nothing."""
    if module.dtype != dtype:
        module.to(dtype)
