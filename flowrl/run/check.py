"""`flowrl check MODEL`: an adapter's contract, tried on a model that lies on disk."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from flowrl.run.config import from_dict
from flowrl.run.prepare import load_policy, pick_device
from flowrl.visual.contract import check_direction, ratio_replayed, rows_apart
from flowrl.visual.pipelines.contract import adapter_apart, pictures_apart
from flowrl.visual.policy import Example
from rewards import media

PROMPTS = ("a red circle", "two blue squares on the left of a green cross")
GUIDANCE = (1.0, 3.0)
EXACT, ROUNDED = 1e-4, 3e-2  # pixels apart and velocities apart that pass: in float32, in bfloat16
RATIO = {torch.float32: 1e-5, torch.bfloat16: 1e-3}


@dataclass(frozen=True)
class Finding:
    """One thing that was tried."""

    name: str
    passed: bool
    said: str


def check(model: str, overrides: Sequence[str], steps: int, prompts: Sequence[str] = PROMPTS) -> Iterator[Finding]:
    """Findings, one at a time; ValueError where the model cannot be loaded at all.

    prompts:   two or more, different
    overrides: model.KEY=VALUE; LoRA is tried unless model.train=full
    """
    run = _run(model, overrides)
    device = torch.device(pick_device(run.model.device))
    policy = load_policy(run, device)
    near = EXACT if policy.dtype == torch.float32 else ROUNDED
    with TemporaryDirectory() as folder:
        examples = [Example(p, pictures=_pictures(policy, Path(folder))) for p in prompts]
        for guidance in GUIDANCE[: 1 + policy.family.GUIDED]:
            apart = pictures_apart(policy, examples, steps=steps, guidance=guidance)
            yield Finding(
                f"parity at guidance {guidance:g}",
                apart <= near,
                f"pixels are {apart:.1e} of 1 from those of {policy.family.PIPELINE} ({steps} steps)",
            )
        apart = rows_apart(policy, examples)
        yield Finding("batch invariance", apart <= near, f"velocities move by {apart:.1e} with their batch")
        apart = ratio_replayed(policy, examples)
        yield Finding("ratio 1", apart <= RATIO[policy.dtype], f"replayed decisions are {apart:.1e} from ratio 1")
        yield _direction(policy, examples)
        if policy.rank:
            apart, effect = adapter_apart(policy, examples)
            said = f"a saved adapter does the same in diffusers to {apart:.1e}, where it does {effect:.1e}"
            yield Finding("LoRA round trip", apart <= max(near, 0.01 * effect) and effect > 1e-4, said)
    yield Finding("memory", True, _memory(policy))


def _run(model, overrides):
    if wrong := [pair for pair in overrides if not pair.startswith("model.")]:
        raise ValueError(f"{wrong[0]!r} has no effect: a check knows the settings model.KEY=VALUE alone.")
    if wrong := [pair for pair in overrides if pair.startswith(("model.offload", "model.cache"))]:
        raise ValueError(f"{wrong[0]!r}: the pipeline itself draws in a check, whole on one device. Leave it out.")
    rest = {"data": {"train": "-"}, "rewards": {"jpeg_size": 1.0}, "recipe": {"name": "flow_grpo"}, "output": "-"}
    return from_dict({"model": {"path": model, "lora": None}, **rest}, overrides)


def _pictures(policy, folder):
    """A picture to edit, for a model that edits."""
    if not policy.family.CONDITIONED:
        return ()
    ramp = torch.linspace(0, 1, 64).expand(64, 64)
    media.save_png(torch.stack([ramp, ramp.T, 1 - ramp]), folder / "a.png")
    return (str(folder / "a.png"),)


def _direction(policy, examples):
    policy.guidance = 1.0
    try:
        error = check_direction(policy, examples)[""]
    except ValueError as fault:
        return Finding("direction", False, str(fault))
    return Finding("direction", True, f"its own reading of the velocity explains its pictures to {error:.2f}")


def _memory(policy):
    parameters = [p for m in policy.pipe.components.values() if isinstance(m, torch.nn.Module) for p in m.parameters()]
    held = sum(p.nbytes for p in parameters)
    trained = sum(p.nbytes for _, p in policy.trainable())
    peak = f", {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB at the peak" if policy.device.type == "cuda" else ""
    return f"{held / 2**30:.2f} GiB of weights, {trained / 2**30:.3f} GiB of them trained{peak}"
