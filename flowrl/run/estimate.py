"""What a run needs of a GPU's memory, from the configuration of its model alone."""

from dataclasses import dataclass

import torch
from torch import nn

from flowrl.recipe import Recipe
from flowrl.run.out_of_memory import KNOBS
from flowrl.run.settings import Lora, Run
from flowrl.visual.pipelines import footprint, parts
from flowrl.visual.pipelines.family import Family
from flowrl.visual.pipelines.lora import add_lora

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2, "bitsandbytes_4bit": 0.56, "bitsandbytes_8bit": 1.02, "torchao_8bit": 1.02}
MOMENTS = {"adamw": 8, "adamw_8bit": 2.03}  # bytes per trained weight; scales of quantised blocks included


@dataclass(frozen=True)
class Memory:
    """GiB on one GPU, without shards; `update` and `encoding` are the phases that need most."""

    parameters: int  # of the networks that are trained, or adapted
    trained: int  # of these and their adapters
    networks: float
    adapters: float  # weights of fp32 beside a frozen base
    encoders: float
    autoencoder: float
    gradients: float
    moments: float
    copies: float  # snapshots and averaged weights
    activations: float  # of one micro-batch
    encoding: float
    update: float


def memory(run: Run, recipe: Recipe, pipe: object, family: Family) -> Memory:
    """Of a run on a pipeline without weights, whose networks get their adapters here."""
    dtype = _dtype(run)
    networks = parts.networks(pipe, family.NETWORKS)
    others = {name: m for name, m in pipe.components.items() if isinstance(m, nn.Module) and name not in networks}
    parameters, lora = _count(networks.values()), (run.model.lora or Lora()) if run.model.train == "lora" else None
    for network in networks.values():
        network.to(dtype if lora else torch.float32)
        if lora:
            chosen, unread = lora.targets or family.TARGETS, family.unread(network)
            add_lora(network, rank=lora.rank, alpha=lora.alpha, targets=chosen, seed=0, unread=unread)
        else:
            parts.thaw(network, family.unread(network))
    trained = sum(p.numel() for network in networks.values() for p in network.parameters() if p.requires_grad)
    seen = footprint.activations(family, dtype if lora else torch.float32)
    kept = seen.checkpointed if run.model.gradient_checkpointing else seen.kept
    rows = run.budget.micro_batch * (2 if recipe.rollout.guidance > 1 and not family.embeds_guidance() else 1)
    copied = sum(rule.decay is not None or lora is None for rule in recipe.snapshots.values())
    size = BYTES[run.model.quantize or str(dtype).removeprefix("torch.")] if lora else 4
    parts_of = {
        "networks": parameters * size,
        "adapters": 4 * trained if lora else 0,
        "encoders": BYTES[str(dtype).removeprefix("torch.")] * _count(m for n, m in others.items() if n != "vae"),
        "autoencoder": 4 * _count(m for n, m in others.items() if n == "vae"),
        "gradients": 4 * trained,
        "moments": MOMENTS[run.optimizer.name] * trained,
        "copies": 4 * trained * (copied + (run.optimizer.ema is not None)),
        "activations": kept * rows,
    }
    gib = {name: x / GIB for name, x in parts_of.items()}
    held = sum(gib[name] for name in ("networks", "adapters", "moments", "copies"))
    beside = 0.0 if run.model.offload else gib["encoders"] + gib["autoencoder"]
    encoding = held + max(beside, gib["encoders"])
    update = held + beside + gib["gradients"] + gib["activations"]
    return Memory(parameters, trained, **gib, encoding=encoding, update=update)


def too_large(found: Memory, run: Run, limit: float) -> list[str]:
    """A line for each phase that does not fit into `limit` GiB, with what helps."""
    helps = {"encoding": KNOBS["encoding texts"], "update": (*KNOBS["the update"], "model.offload")}
    return [
        f"{phase} needs {getattr(found, phase):.1f} GiB of {limit:g}: {', '.join(knobs)}"
        for phase, knobs in helps.items()
        if getattr(found, phase) > limit
    ]


def _dtype(run):
    return torch.bfloat16 if run.model.dtype == "auto" else getattr(torch, run.model.dtype)


def _count(modules):
    return sum(p.numel() for module in modules for p in module.parameters())
