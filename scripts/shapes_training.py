"""Data-parallel training whose result depends on the seed alone: not on clocks, interruptions or luck.

Every draw comes from a generator seeded by (seed, stage, step, rank).  All weights of a module live in one flat
tensor, so a gradient is one all-reduce and a checkpoint four tensors.  Needs an initialised process group.
"""

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class Stage:
    """How one module is trained; batch is over all ranks."""

    name: str
    steps: int
    batch: int
    rate: float  # learning rate after warm-up
    warmup: int  # steps
    decay: int  # steps at the end in which the rate falls to a hundredth
    betas: tuple[float, float]
    average: float  # decay per step of the averaged weights
    save_every: int  # steps

    def rate_at(self, step: int) -> float:
        """Linear warm-up, constant, linear decay."""
        fall = max(0.01, min(1.0, (self.steps - step) / max(1, self.decay)))
        return self.rate * min(1.0, (step + 1) / self.warmup) * fall


def generator(*name) -> torch.Generator:
    """A private source of random numbers, seeded by what it is for."""
    digest = hashlib.sha256("/".join(map(str, name)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


class FlatModule:
    """A module whose weights, gradients, Adam moments and averages are single tensors."""

    def __init__(self, module: nn.Module, betas: tuple[float, float]):
        parameters = list(module.parameters())
        self.module = module
        self.weights = nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))
        self.weights.grad = torch.zeros_like(self.weights)
        self.average = self.weights.detach().clone()
        self.optimizer = torch.optim.AdamW([self.weights], betas=betas, weight_decay=0.01, fused=True)
        self.optimizer.state[self.weights] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(self.weights),
            "exp_avg_sq": torch.zeros_like(self.weights),
        }
        start = 0
        for p in parameters:
            end = start + p.numel()
            p.data = self.weights.data[start:end].view_as(p)
            p.grad = self.weights.grad[start:end].view_as(p)
            start = end

    def step(self, rate: float) -> None:
        """Average the gradient over ranks, clip its norm to 1, move the weights and then their average; zero it."""
        gradient = self.weights.grad
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
        nn.utils.clip_grad_norm_([self.weights], 1.0)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        gradient.zero_()

    def update_average(self, decay: float) -> None:
        self.average.lerp_(self.weights.detach(), 1 - decay)

    def use_average(self) -> None:
        """Give the module its averaged weights, for good."""
        self.weights.data.copy_(self.average)
        self.module.eval()

    def tensors(self) -> dict[str, Tensor]:
        """All that must be saved, by name; the tensors themselves, not copies."""
        state = self.optimizer.state[self.weights]
        return {"weights": self.weights.data, "average": self.average, **state}


def train(
    module: nn.Module,
    loss: Callable[[torch.Generator, int], Tensor],
    stage: Stage,
    seed: int,
    checkpoint: Path,
) -> None:
    """Train `module` in place and leave it with averaged weights.

    loss(generator, rows) draws `rows` examples and returns their mean loss.  Continues from `checkpoint` if there
    is one; every rank reads it and rank 0 writes it, since all ranks hold the same weights.
    """
    flat, rank, ranks = FlatModule(module.train(), stage.betas), dist.get_rank(), dist.get_world_size()
    if stage.batch % ranks:
        raise ValueError(f"batch: {stage.batch} given, a multiple of the {ranks} processes accepted")
    first, before = load_checkpoint(checkpoint, flat.tensors()) if checkpoint.exists() else (0, 0.0)
    dist.barrier()  # nobody writes the checkpoint while another reads it
    began, recent = time.monotonic(), []
    for step in range(first, stage.steps):
        value = loss(generator(seed, stage.name, step, rank), stage.batch // ranks)
        value.backward()
        flat.step(stage.rate_at(step))
        flat.update_average(min(stage.average, (step + 1) / (step + 20)))
        recent = [*recent[-99:], value.item()]
        done, seconds = step + 1, time.monotonic() - began
        if rank == 0 and (done % 100 == 0 or done == stage.steps):
            print(progress(stage, done, done - first, seconds, sum(recent) / len(recent)), flush=True)
        if rank == 0 and (done % stage.save_every == 0 or done == stage.steps):
            save_checkpoint(checkpoint, flat.tensors(), done, before + seconds)
    dist.barrier()
    flat.use_average()


def progress(stage: Stage, done: int, fresh: int, seconds: float, loss: float) -> str:
    """One line; `fresh` of the `done` steps were made in the last `seconds`."""
    left = math.ceil((stage.steps - done) * seconds / fresh / 60)
    rate = fresh * stage.batch / seconds
    return f"{stage.name}: step {done} of {stage.steps}, loss {loss:.4f}, {rate:.0f} pictures/s, {left} min left"


def save_checkpoint(path: Path, tensors: dict[str, Tensor], step: int, seconds: float) -> None:
    """Write aside, then rename: a reader finds the old file or the new one, never half of it."""
    write_safetensors(path, tensors, {"step": str(step), "seconds": str(seconds)})


def load_checkpoint(path: Path, tensors: dict[str, Tensor]) -> tuple[int, float]:
    """Copy a checkpoint into `tensors`; returns the steps done and the seconds they took."""
    with safe_open(path, "pt") as file:
        for name, tensor in tensors.items():
            tensor.copy_(file.get_tensor(name))
        return int(file.metadata()["step"]), float(file.metadata()["seconds"])


def seconds_spent(path: Path) -> float:
    """Seconds of work behind a file, over all interruptions."""
    with safe_open(path, "pt") as file:
        return float(file.metadata()["seconds"])


def write_safetensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    aside = path.with_suffix(".partial")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, aside, metadata)
    aside.replace(path)
