"""What can be wrong between the processes of a run: a launcher that asks for what is not there."""

import os
from collections.abc import Mapping

ENGINES = {  # variable that accelerate's launcher sets -> who is refused, and why
    "ACCELERATE_USE_DEEPSPEED": (
        "DeepSpeed",
        "the learner sums gradients over ranks and skips a step on all ranks alike, which is unproven with ZeRO",
    ),
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM", "models are diffusers pipelines, which it cannot split"),
    "ACCELERATE_USE_FSDP": ("FSDP", "not supported yet: replicas with one summed gradient"),
}
PLAIN = "Accepted: plain replicas, as in scripts/accelerate/eight_gpus.yaml."


def check_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """ValueError where `accelerate launch` was told what a run would silently leave out."""
    for variable, (name, why) in ENGINES.items():
        if environment.get(variable, "false").lower() in ("true", "1", "yes", "y", "on", "t"):
            raise ValueError(f"the launcher asks for {name} ({variable}): {why}. {PLAIN}")
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision != "no":
        raise ValueError(
            f"the launcher asks for mixed precision {precision!r} (ACCELERATE_MIXED_PRECISION): set model.dtype "
            "instead, and launch with --mixed_precision no."
        )
