"""The optimiser behind a few verbs, micro_batches, backward, step or skip: reduction over ranks, clipping, schedule."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from flowrl.run.sharding import shared_as, whole

MOST_SKIPPED = 5  # optimizer steps in a row without a finite gradient, after which a run stops


class Learner:
    """An optimiser over named parameters, with one gradient reduction and one step per update.

    micro_batch: network calls per forward and backward pass: memory, never the gradient
    rate:        iteration (from 0) -> learning rate
    reduce:      sums the gradients of all ranks in place; the weights of all ranks sum to 1, so there is no division
    agree:       micro-batches here -> of every rank, where all have to make equally many
    gather:      rows of this rank -> of every rank
    optimizer:   (parameters, lr=, betas=, weight_decay=) -> optimiser, as flowrl.run.optimizers finds it by name
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        rate: Callable[[int], float],
        *,
        micro_batch: int,
        max_grad_norm: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 1e-4,
        reduce: Callable[[list[Tensor]], None] = lambda gradients: None,
        agree: Callable[[int], int] = lambda count: count,
        gather: Callable[[Tensor], Tensor] = lambda rows: rows,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    ):
        self.names, self.parameters = zip(*parameters, strict=True)
        self.optimizer = optimizer(self.parameters, lr=rate(0), betas=betas, weight_decay=weight_decay)
        self.rate, self.micro_batch, self.max_grad_norm = rate, micro_batch, max_grad_norm
        self.reduce, self.agree, self.gather = reduce, agree, gather
        self._reached = False  # every parameter, by the first gradient
        self.updates = self.skipped = self._in_a_row = 0  # updates: iterations done; the others count optimizer steps
        self.begin(0)
        self.optimizer.zero_grad(set_to_none=True)  # whatever was trained before is not of the first update

    def begin(self, iteration: int, *, restorable: bool = False) -> None:
        """The optimizer updates of an iteration follow: one learning rate for all of them.

        restorable: keep the present weights, so that `go_back` can return towards them
        """
        self._iteration, self._rate_now = iteration, self.rate(iteration)
        self._start = [p.detach().clone() for p in self.parameters] if restorable else None

    @torch.no_grad()
    def go_back(self, kept: float) -> None:
        """Weights of `begin` plus the share `kept` of the way from there; the optimiser's moments stay."""
        for parameter, start in zip(self.parameters, self._start, strict=True):
            parameter.lerp_(start, 1 - kept)

    def micro_batches(self, points) -> Iterator:
        return points.split(self.micro_batch, self.agree)

    def backward(self, loss: Tensor) -> None:
        """Accumulate; a loss that is not a number becomes a non-finite gradient, which `step` sees on every rank."""
        loss.backward()

    @torch.no_grad()
    def step(self) -> dict[str, float | int | str]:
        """Reduce, clip, step, clear.  A non-finite gradient leaves weights and optimiser untouched and is counted."""
        gradients = self._summed()
        rate = self._rate_now
        norm = whole(nn.utils.get_total_norm(gradients))
        log = {"grad_norm": float(norm), "learning_rate": rate}
        if math.isfinite(log["grad_norm"]):
            nn.utils.clip_grads_with_norm_(self.parameters, self.max_grad_norm, norm)
            before = [parameter.clone() for parameter in self.parameters]
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            moved = torch.stack([whole((p - b).norm()) for p, b in zip(self.parameters, before, strict=True)]).norm()
            log["param_delta_norm"], self._in_a_row = float(moved), 0
        else:
            self.skipped, self._in_a_row = self.skipped + 1, self._in_a_row + 1
            first = next(n for n, g in zip(self.names, gradients, strict=True) if not bool(whole(g.isfinite().all())))
            log |= {"skipped_nonfinite": self.skipped, "nonfinite_parameter": first, "param_delta_norm": 0.0}
            if self._in_a_row == MOST_SKIPPED:
                raise RuntimeError(
                    f"{MOST_SKIPPED} optimizer steps in a row without a finite gradient, the last time in {first}."
                )
        self.updates = self._iteration + 1
        self.optimizer.zero_grad(set_to_none=True)
        return log

    def skip(self) -> dict[str, float]:
        """No rank has anything to learn from: nothing is reduced, weights and optimiser stay as they are."""
        assert all(parameter.grad is None for parameter in self.parameters), "a gradient of no row"
        self.updates = self._iteration + 1
        return {"grad_norm": 0.0, "learning_rate": self._rate_now, "param_delta_norm": 0.0}

    def _summed(self):
        """The gradients of all ranks; zeros of one whose share held no rows."""
        if not self._reached:
            self._check_reached()
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self.parameters]
        self.reduce(gradients)
        return gradients

    def _check_reached(self):
        """C95: the first rows of a run give every parameter a gradient, be it of zeros, or some can never learn."""
        here = torch.tensor([[parameter.grad is not None for parameter in self.parameters]])
        found = self.gather(here).any(0).tolist()
        self._reached = all(found)
        if any(found) and not self._reached:
            missing = [name for name, there in zip(self.names, found, strict=True) if not there]
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise RuntimeError(
                f"{len(missing)} of {len(found)} trainable tensors got no gradient: {shown}. They are frozen, unused, "
                "or cut off by re-entrant checkpointing or a detached output; train others (model.lora.targets) or "
                "mend the network."
            )

    def state(self) -> dict[str, dict[str, Tensor | float | int]]:
        """What the optimiser keeps, {quantity: {parameter: value}}: exp_avg, exp_avg_sq and step of AdamW."""
        kept = [(n, self.optimizer.state[p]) for n, p in zip(self.names, self.parameters, strict=True)]
        quantities = dict.fromkeys(quantity for _, values in kept for quantity in values)
        return {q: {name: values[q] for name, values in kept if q in values} for q in quantities}

    def counters(self) -> dict[str, int]:
        return {"updates": self.updates, "skipped": self.skipped, "in_a_row": self._in_a_row}

    def restore(self, state: Mapping[str, Mapping[str, Tensor | float | int]], counters: Mapping[str, int]) -> None:
        """Put back what `state` and `counters` returned; torch moves the values to their parameters."""
        by_number = [
            {q: _of(values[n], parameter) for q, values in state.items() if n in values}
            for n, parameter in zip(self.names, self.parameters, strict=True)
        ]
        groups = self.optimizer.state_dict()["param_groups"]
        kept = {i: values for i, values in enumerate(by_number) if values}
        self.optimizer.load_state_dict({"state": kept, "param_groups": groups})
        self.updates, self.skipped, self._in_a_row = (counters[n] for n in ("updates", "skipped", "in_a_row"))


def _of(value, parameter):
    """A value of the optimiser, shared out over processes as its parameter is."""
    same = isinstance(value, Tensor) and value.shape == parameter.shape
    return shared_as(value, parameter) if same else value


def learning_rate(update: int, *, rate: float, schedule: str, warmup: int, updates: int) -> float:
    """Rate of an update (from 0): linear warm-up over `warmup` updates, then constant, linear or cosine towards 0."""
    if update < warmup:
        return rate * (update + 1) / (warmup + 1)
    progress = (update - warmup) / max(updates - warmup, 1)
    if schedule == "linear":
        return rate * (1 - progress)
    if schedule == "cosine":
        return rate * 0.5 * (1 + math.cos(math.pi * progress))
    return rate
