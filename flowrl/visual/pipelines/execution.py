"""How a network runs: its attention backend, its compilation, the quantised weights that stay frozen."""

import importlib.util

import torch
import torch._dynamo
from diffusers import BitsAndBytesConfig, PipelineQuantizationConfig, TorchAoConfig
from torch import nn

ATTENTION = ("native", "xformers", "flash")  # of diffusers; the first is torch's own
PACKAGES = {"xformers": "xformers", "flash": "flash_attn", "bitsandbytes": "bitsandbytes", "torchao": "torchao"}
GRAPHS = 64  # of one network
QUANTIZED = ("bitsandbytes_4bit", "bitsandbytes_8bit", "torchao_8bit")  # package and bits


def need(package: str, setting: str) -> None:
    """ValueError where a package that a setting asks for is not installed."""
    if importlib.util.find_spec(PACKAGES[package]) is None:
        raise ValueError(f"{setting} needs the package {PACKAGES[package]}, which is not installed.")


def quantization(setting: str, components: list[str], dtype: torch.dtype) -> PipelineQuantizationConfig:
    """Frozen weights of `components` in 4 or 8 bits, computed with in dtype; adapters on them stay fp32."""
    package, bits = setting.split("_")
    need(package, f"model.quantize = {setting}")
    if setting == "torchao_8bit":
        from torchao.quantization import Int8WeightOnlyConfig

        config = TorchAoConfig(Int8WeightOnlyConfig(version=2))
    elif bits == "4bit":
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    else:
        config = BitsAndBytesConfig(load_in_8bit=True)
    return PipelineQuantizationConfig(quant_mapping=dict.fromkeys(components, config))


def set_attention(network: nn.Module, backend: str, device: torch.device) -> None:
    """Attention by another backend of diffusers; ValueError where it would not be used."""
    if backend == ATTENTION[0]:
        return
    need(backend, f"model.attention = {backend}")
    if device.type == "cpu":
        raise ValueError(f"model.attention = {backend} needs a GPU. Accepted here: {ATTENTION[0]}.")
    network.set_attention_backend(backend)
    processors = network.attn_processors.values() if hasattr(network, "attn_processors") else ()
    if not any(hasattr(processor, "_attention_backend") for processor in processors):
        raise ValueError(f"model.attention = {backend} has no effect: {type(network).__name__} takes no backend.")


def compile_in_place(network: nn.Module, backend: str) -> None:
    """torch.compile without another module around it, so that parameters keep their names.

    Rows, gradients and adapters that are on or off make more graphs than torch allows; beyond that limit it would go on
    without compiling, so that a replay is no longer what drew.
    """
    torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
    network.compile(backend=backend)
