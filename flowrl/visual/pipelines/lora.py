"""Low-rank adapters on a diffusers network: made, switched off, and saved so that plain diffusers loads them."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from diffusers.loaders import PeftAdapterMixin
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn

from flowrl import randomness
from flowrl.part import nearest

NAME = "policy"
FILE = "pytorch_lora_weights.safetensors"


def add_lora(
    network: nn.Module, *, rank: int, alpha: float, targets: Sequence[str], seed: int, unread: Sequence[str] = ()
) -> None:
    """Freeze the network and give the modules whose names end in one of `targets` an adapter in fp32.

    Modules that are `unread`, or inside of such, get none.
    A is N(0, 1/rank^2) from a generator of its own, B is 0: the start is exactly the base model.
    """
    if not isinstance(network, PeftAdapterMixin):
        raise ValueError(
            f"model.train = 'lora': diffusers' {type(network).__name__} takes no adapters; use model.train = full."
        )
    names = [name for name, _ in network.named_modules()]
    for target in targets:
        if not any(name == target or name.endswith("." + target) for name in names):
            known = sorted({name.rpartition("blocks.")[2].partition(".")[2] for name in names} - {""})
            kind = type(network).__name__
            raise ValueError(f"model.lora.targets: no module of {kind} ends in {target!r}. {nearest(target, known)}")
    network.requires_grad_(False)
    adapted = [name for name in names if any(f".{name}".endswith(f".{target}") for target in targets)]
    read = [name for name in adapted if not any(f"{name}.".startswith(f"{part}.") for part in unread)]
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets) if read == adapted else read)
    with torch.random.fork_rng(devices=[]):
        network.add_adapter(config, adapter_name=NAME)
    for name, parameter in network.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            parameter.data = parameter.data.float()
        if ".lora_A." in name:
            drawn = torch.randn(parameter.shape, generator=randomness.generator(seed, "lora", name)) / rank
            parameter.data.copy_(drawn)


@contextmanager
def without_lora(networks: Iterable[nn.Module]):
    """The base model; switching an adapter off and on flips requires_grad, which is put back."""
    networks = list(networks)
    trainable = [p for network in networks for p in network.parameters() if p.requires_grad]
    for network in networks:
        network.disable_adapters()
    try:
        yield
    finally:
        for network in networks:
            network.enable_adapters()
        for parameter in trainable:
            parameter.requires_grad_(True)


def lora_weights(network: nn.Module) -> dict[str, torch.Tensor]:
    """The adapter's weights under the names that PEFT gives them."""
    return get_peft_model_state_dict(network, adapter_name=NAME)


def save_lora(pipeline, name: str, directory: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Write `pytorch_lora_weights.safetensors` with the alpha in its metadata, and read it back as diffusers would.

    name:    component that the adapter sits on; another than the pipeline's first has a folder of its name, for
             load_lora_weights(DIRECTORY / name, load_into_NAME=True)
    weights: see lora_weights
    """
    network, own = getattr(pipeline, name), _keyed(pipeline)
    weights = {key: x.detach().cpu().contiguous() for key, x in weights.items()}
    adapter = network.peft_config[NAME].to_dict()
    config = {key: sorted(x) if isinstance(x, set) else x for key, x in adapter.items()}
    place = directory if name == own else directory / name
    layers = {f"{own}_lora_layers": weights, f"{own}_lora_adapter_metadata": config}
    type(pipeline).save_lora_weights(place, **layers)
    read, _ = _read(pipeline, place)
    same = len(read) == len(weights) and all(torch.equal(read[key], x) for key, x in weights.items())
    if not weights or not same:
        raise RuntimeError(f"{place}: diffusers does not read back the adapter that was written.")


def load_lora(pipeline, name: str, directory: Path) -> None:
    """Put a saved adapter's weights into the adapter that the policy has."""
    place = directory if name == _keyed(pipeline) else directory / name
    if not (place / FILE).is_file():
        raise ValueError(f"{str(place)!r} holds no adapter: it has no {FILE}.")
    network = getattr(pipeline, name)
    (saved, metadata), present = _read(pipeline, place), lora_weights(network)
    if saved.keys() != present.keys() or any(saved[k].shape != x.shape for k, x in present.items()):
        theirs, ours = _describe(saved), _describe(present)
        raise ValueError(f"{str(place)!r}: its adapter has {theirs}; model.lora says {ours}.")
    alpha, given = network.peft_config[NAME].lora_alpha, metadata.get("lora_alpha")
    if given not in (None, alpha):
        raise ValueError(f"{str(place)!r} was trained with alpha {given:g}; model.lora.alpha = {alpha:g} differs.")
    set_peft_model_state_dict(network, saved, adapter_name=NAME)


def merge_lora(networks: Iterable[nn.Module]) -> None:
    """Add the adapters to the weights that they adapt, for good; what is left is plain networks."""
    for network in networks:
        network.fuse_lora(adapter_names=[NAME])
        network.unload_lora()


def _keyed(pipeline):
    """Component that the keys of a file are named after, whichever it is for."""
    return pipeline.unet_name if hasattr(pipeline, "unet") else pipeline.transformer_name


def _read(pipeline, place):
    """(weights under PEFT's names, metadata) of a file, as diffusers reads it."""
    prefix = f"{_keyed(pipeline)}."
    read, *_, metadata = type(pipeline).lora_state_dict(place, return_lora_metadata=True)
    weights = {key.removeprefix(prefix): x for key, x in read.items()}
    return weights, {key.removeprefix(prefix): x for key, x in (metadata or {}).items()}


def _describe(weights):
    """Rank and adapted modules of an adapter's weights, in words."""
    ranks = sorted({x.shape[0] for name, x in weights.items() if ".lora_A." in name})
    modules = [name.partition(".lora_A.")[0] for name in weights if ".lora_A." in name]
    short = sorted({name.rpartition("blocks.")[2].partition(".")[2] or name for name in modules})
    return f"rank {', '.join(map(str, ranks))} on {len(modules)} modules ({', '.join(short)})"
