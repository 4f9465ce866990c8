"""Optimisers by name: (parameters, lr=, betas=, weight_decay=) -> torch.optim.Optimizer."""

from collections.abc import Callable

import torch

from flowrl.run.packages import installed


def find(name: str, *, sharded: bool = False) -> Callable[..., torch.optim.Optimizer]:
    """The optimiser class of `optimizer.name`; ValueError where it cannot run here.

    adamw:      moments in the dtype of the trainable weights, fp32: 8 bytes per weight
    adamw_8bit: block-wise quantised moments (arXiv 2110.02861), 2 bytes per weight; tensors below 4,096 entries keep
                fp32 moments. Needs the package bitsandbytes, the extra `memory`.
    """
    if name == "adamw":
        return torch.optim.AdamW
    if sharded:
        raise ValueError(
            f"optimizer.name = {name} does not know weights shared out by FSDP2, whose moments are shared out already; "
            "use adamw, or launch replicas (scripts/accelerate/eight_gpus.yaml)."
        )
    if not installed("bitsandbytes"):
        raise ValueError(
            f"optimizer.name = {name} needs the package bitsandbytes: pip install 'flowrl[memory]', or use adamw."
        )
    from bitsandbytes.optim import AdamW8bit  # takes seconds to import

    return AdamW8bit
