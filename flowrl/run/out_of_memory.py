"""C91: a run that does not fit says in which phase, and the settings that help there."""

from collections.abc import Callable
from functools import wraps

import torch

from flowrl.run.prepare import Prepared
from flowrl.run.settings import Run

KNOBS = {  # phase: settings that make it smaller, the one that costs least first
    "encoding texts": ("model.offload", "model.cache", "model.dtype"),
    "the rollout": ("budget.batch_size", "model.offload", "model.quantize"),
    "decoding": ("budget.batch_size", "model.vae_slicing", "model.vae_tiling"),
    "the update": ("budget.micro_batch", "model.gradient_checkpointing", "model.quantize"),
    "the optimiser step": ("optimizer.name", "model.train", "model.lora"),
}


def watch(prepared: Prepared) -> None:
    """Name the phase in which memory ends."""
    policy, learner, run = prepared.policy, prepared.learner, prepared.run
    for owner, method, phase in (
        (policy, "encode", lambda: "encoding texts"),
        (policy, "velocity", lambda: "the update" if torch.is_grad_enabled() else "the rollout"),
        (policy, "decode", lambda: "decoding"),
        (learner, "backward", lambda: "the update"),
        (learner, "step", lambda: "the optimiser step"),
    ):
        setattr(owner, method, _named(getattr(owner, method), phase, run))


def _named(call: Callable, phase: Callable[[], str], run: Run) -> Callable:
    @wraps(call)
    def named(*args, **kwargs):
        try:
            return call(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            here = phase()
            helps = ", ".join(f"{knob} (now {_value(run, knob)})" for knob in KNOBS[here])
            said = str(error).split(". ")[0].rstrip(".")
            raise RuntimeError(f"out of memory in {here}: {said}. What helps here: {helps}.") from error

    return named


def _value(run, knob):
    section, name = knob.split(".")
    value = getattr(getattr(run, section), name)
    return {None: "none", True: "true", False: "false"}.get(value, value) if isinstance(value, bool | None) else value
