"""What can be wrong between the processes of a run: launchers that are refused, ranks that disagree, and lost ones."""

import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

LIBRARIES = ("diffusers", "transformers", "accelerate", "peft")

ENGINES = {  # variable that accelerate's launcher sets -> who is refused, and why
    "ACCELERATE_USE_DEEPSPEED": (
        "DeepSpeed",
        "the learner sums gradients over ranks and skips a step on all ranks alike, which is unproven with ZeRO",
    ),
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM", "models are diffusers pipelines, which it cannot split"),
}
ACCEPTED = "Accepted: replicas and FSDP2, as in scripts/accelerate/eight_gpus.yaml and fsdp2.yaml."
FSDP = {  # variable -> accepted values, and why no other
    "FSDP_VERSION": (("2",), "set fsdp_version: 2"),
    "FSDP_OFFLOAD_PARAMS": (("false",), "weights stay on the device; set fsdp_offload_params: false"),
    "FSDP_RESHARD_AFTER_FORWARD": (("true", "full_shard"), "weights are let go after each call; set it to true"),
    "FSDP_AUTO_WRAP_POLICY": (("transformer_based_wrap",), "the model's own blocks are gathered one at a time"),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": ((), "the model's own blocks are gathered one at a time; leave it out"),
    "FSDP_ACTIVATION_CHECKPOINTING": (("false",), "set model.gradient_checkpointing instead"),
}


class PeerLost(RuntimeError):
    """Another process ended, or did not come to a sum or a table in time; what this one still holds is whole."""


def check_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """ValueError where `accelerate launch` was told what a run would silently leave out."""
    for variable, (name, why) in ENGINES.items():
        if _asked(environment, variable):
            raise ValueError(f"the launcher asks for {name} ({variable}): {why}. {ACCEPTED}")
    for variable, (accepted, why) in FSDP.items() if sharded(environment) else ():
        given = environment.get(variable, "").lower()
        if given and given not in accepted:
            raise ValueError(f"the launcher asks for FSDP with {variable}={environment[variable]}: {why}.")
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision != "no":
        raise ValueError(
            f"the launcher asks for mixed precision {precision!r} (ACCELERATE_MIXED_PRECISION): set model.dtype "
            "instead, and launch with --mixed_precision no."
        )


def sharded(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher asks for FSDP: weights shared out over the processes."""
    return _asked(environment, "ACCELERATE_USE_FSDP")


def _asked(environment, variable):
    return environment.get(variable, "false").lower() in ("true", "1", "yes", "y", "on", "t")


def check_alike(parts: Mapping[str, object], gather: Callable[[Tensor], Tensor]) -> None:
    """ValueError, the same one on every process, that names who has another part than most; a tie goes to the first.

    parts:  what has to be the same everywhere, by name; whatever JSON can hold
    gather: rows of each process -> all rows, in the order of processes
    """
    mine = [list(hashlib.sha256(json.dumps(part, sort_keys=True).encode()).digest()) for part in parts.values()]
    table = gather(torch.tensor([mine], dtype=torch.uint8)).tolist()
    odd = defaultdict(list)
    for name, *digests in zip(parts, *table, strict=True):
        digests = [bytes(digest) for digest in digests]
        usual, _ = Counter(digests).most_common(1)[0]
        for rank in (rank for rank, digest in enumerate(digests) if digest != usual):
            odd[rank].append(name)
    if odd:
        told = "; ".join(f"process {rank} differs in its {', '.join(names)}" for rank, names in sorted(odd.items()))
        raise ValueError(f"the {len(table)} processes are not set up alike: {told}.")


def versions() -> dict[str, str]:
    """Of the libraries that compute; that of flowrl is a digest of its code, of rewards and of samplers."""
    root, code = Path(__file__).resolve().parents[2], hashlib.sha256()
    for path in sorted(path for name in ("flowrl", "rewards", "samplers") for path in (root / name).rglob("*.py")):
        code.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return {name: version(name) for name in LIBRARIES} | {"torch": torch.__version__, "flowrl": code.hexdigest()[:12]}
