"""Low-rank adapters on a diffusers transformer: made, switched off, and saved so that plain diffusers loads them."""

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn

from flowrl import randomness
from flowrl.part import nearest

NAME = "policy"
FILE = "pytorch_lora_weights.safetensors"


def add_lora(transformer: nn.Module, *, rank: int, alpha: float, targets: Sequence[str], seed: int) -> None:
    """Freeze the transformer and give the modules whose names end in one of `targets` an adapter in fp32.

    A is N(0, 1/rank^2) from a generator of its own, B is 0: the start is exactly the base model.
    """
    names = [name for name, _ in transformer.named_modules()]
    for target in targets:
        if not any(name == target or name.endswith("." + target) for name in names):
            known = sorted({name.rpartition("transformer_blocks.")[2].partition(".")[2] for name in names} - {""})
            raise ValueError(
                f"model.lora.targets: no module of the transformer ends in {target!r}. {nearest(target, known)}"
            )
    transformer.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        transformer.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets)), adapter_name=NAME)
    for name, parameter in transformer.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            parameter.data = parameter.data.float()
        if ".lora_A." in name:
            drawn = torch.randn(parameter.shape, generator=randomness.generator(seed, "lora", name)) / rank
            parameter.data.copy_(drawn)


@contextmanager
def without_lora(transformer: nn.Module):
    """The base model; switching an adapter off and on flips requires_grad, which is put back."""
    trainable = [p for p in transformer.parameters() if p.requires_grad]
    transformer.disable_adapters()
    try:
        yield
    finally:
        transformer.enable_adapters()
        for parameter in trainable:
            parameter.requires_grad_(True)


def lora_weights(pipeline) -> dict[str, torch.Tensor]:
    """The adapter's weights under the names that PEFT gives them."""
    return get_peft_model_state_dict(pipeline.transformer, adapter_name=NAME)


def save_lora(pipeline, directory: Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write `pytorch_lora_weights.safetensors` with the alpha in its metadata, and read it back as diffusers would.

    weights: by default those in force
    """
    adapter = pipeline.transformer.peft_config[NAME]
    weights = lora_weights(pipeline) if weights is None else weights
    weights = {name: x.detach().cpu().contiguous() for name, x in weights.items()}
    config = {k: sorted(v) if isinstance(v, set) else v for k, v in adapter.to_dict().items()}
    type(pipeline).save_lora_weights(
        directory, transformer_lora_layers=weights, transformer_lora_adapter_metadata=config
    )
    read = type(pipeline).lora_state_dict(directory)
    prefix = f"{type(pipeline).transformer_name}."
    same = len(read) == len(weights) and all(torch.equal(read[prefix + name], x) for name, x in weights.items())
    if not weights or not same:
        raise RuntimeError(f"{directory}: diffusers does not read back the adapter that was written.")


def load_lora(pipeline, directory: Path) -> None:
    """Put a saved adapter's weights into the adapter that the policy has."""
    if not (directory / FILE).is_file():
        raise ValueError(f"{str(directory)!r} holds no adapter: it has no {FILE}.")
    prefix = f"{type(pipeline).transformer_name}."
    read, metadata = type(pipeline).lora_state_dict(directory, return_lora_metadata=True)
    saved = {k.removeprefix(prefix): v for k, v in read.items()}
    present = lora_weights(pipeline)
    if saved.keys() != present.keys() or any(saved[k].shape != x.shape for k, x in present.items()):
        theirs, ours = _describe(saved), _describe(present)
        raise ValueError(f"{str(directory)!r}: its adapter has {theirs}; model.lora says {ours}.")
    alpha, given = pipeline.transformer.peft_config[NAME].lora_alpha, (metadata or {}).get(f"{prefix}lora_alpha")
    if given not in (None, alpha):
        raise ValueError(f"{str(directory)!r} was trained with alpha {given:g}; model.lora.alpha = {alpha:g} differs.")
    set_peft_model_state_dict(pipeline.transformer, saved, adapter_name=NAME)


def merge_lora(pipeline) -> None:
    """Add the adapter to the weights that it adapts, for good; what is left is a plain pipeline."""
    pipeline.fuse_lora(components=["transformer"], adapter_names=[NAME])
    pipeline.unload_lora_weights()


def _describe(weights):
    """Rank and adapted modules of an adapter's weights, in words."""
    ranks = sorted({x.shape[0] for name, x in weights.items() if ".lora_A." in name})
    modules = [name.partition(".lora_A.")[0] for name in weights if ".lora_A." in name]
    short = sorted({name.rpartition("transformer_blocks.")[2].partition(".")[2] or name for name in modules})
    return f"rank {', '.join(map(str, ranks))} on {len(modules)} modules ({', '.join(short)})"
