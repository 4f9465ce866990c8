"""How close an update comes to the work that it cannot do without, in time and in memory.

    python scripts/bench_limit.py [flow_grpo branch_grpo diffusion_nft ...] [--pairs 5] [--prompts 12]

The limit is the same network calls in the same shapes, through the raw transformer with the embeddings gathered before,
the decoder, the reward and the optimiser's step, and nothing else. Both are timed in turn, in one process.
"""

import argparse
import os
import statistics
import time
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowrl.run import config
from flowrl.run.prepare import Prepared, prepare
from flowrl.visual.trainer import update

RATE = 1e-12  # nothing moves, so every update is the same work


@dataclass(frozen=True)
class Call:
    """One call of the raw transformer: its arguments, whose weights, and the gradient that comes back, if one does."""

    arguments: dict[str, Tensor]
    weights: str
    cotangent: Tensor | None

    @property
    def rows(self) -> int:
        return len(self.arguments["hidden_states"])


@dataclass
class Work:
    """What one update did."""

    calls: list[Call]
    decoded: list[Tensor]
    scored: list[tuple]


def prepared_for(recipe: str, train: str, prompts: int) -> Prepared:
    """The bench's run with this recipe, ready to update; nothing is written."""
    given = [f"recipe.name={recipe}", f"model.train={train}", f"budget.prompts_per_update={prompts}"]
    given += [f"optimizer.learning_rate={RATE}", "optimizer.schedule=constant", "optimizer.ema=null"]
    given += ["output=runs/bench_limit_writes_nothing", *(["model.lora.rank=32"] if train == "lora" else [])]
    ready = prepare(config.load("bench", given))
    for name, rule in ready.recipe.snapshots.items():
        ready.policy.snapshot(name, rule, 0)
    return ready


def one_update(ready: Prepared, score: Callable | None = None) -> dict:
    """The loop body, as a run calls it."""
    examples = ready.train[: ready.run.budget.prompts_per_update]
    score, size = score or ready.score, ready.run.budget.batch_size
    return update(ready.policy, ready.recipe, examples, score, ready.learner, seed=0, iteration=0, batch_size=size)


def record(ready: Prepared) -> Work:
    """Watch one update at the doors: the transformer, the decoder, the reward."""
    work, policy, weights = Work([], [], []), ready.policy, ["current"]
    transformer, at, decode = policy.pipe.transformer, policy.at, policy.decode

    def seen(module, args, kwargs, out):
        kept = {name: x.detach() if isinstance(x, Tensor) else x for name, x in kwargs.items()}
        cotangent = torch.randn_like(out[0]) / out[0].numel() if out[0].requires_grad else None
        work.calls.append(Call(kept, weights[-1], cotangent))

    @contextmanager
    def named(name):
        weights.append(name)
        with at(name):
            yield
        weights.pop()

    def scored(*args):
        work.scored.append(args)
        return ready.score(*args)

    hook = transformer.register_forward_hook(seen, with_kwargs=True)
    policy.at, policy.decode = named, lambda latents: (work.decoded.append(latents), decode(latents))[1]
    try:
        one_update(ready, scored)
    finally:
        hook.remove()
        del policy.at, policy.decode
    return work


def bare(ready: Prepared, work: Work) -> None:
    """The same calls and nothing else; those of a snapshot in a row, so that its weights are put in place once."""
    policy, transformer = ready.policy, ready.policy.pipe.transformer
    for name in sorted({call.weights for call in work.calls}, reverse=True):
        with policy.at(name):
            for call in (call for call in work.calls if call.weights == name):
                with torch.set_grad_enabled(call.cotangent is not None):
                    out = transformer(**call.arguments)[0]
                if call.cotangent is not None:
                    out.backward(call.cotangent)
    for latents in work.decoded:
        policy.decode(latents)
    for arguments in work.scored:
        ready.score(*arguments)
    ready.learner.optimizer.step()
    ready.learner.optimizer.zero_grad(set_to_none=True)


def ratios(ready: Prepared, work: Work, pairs: int) -> list[tuple[float, float]]:
    """(seconds of an update, seconds of the bare work) of each pair, in turn first."""
    found = []
    for pair in range(pairs):
        both = [partial(one_update, ready), partial(bare, ready, work)]
        took = [_timed(f) for f in (both if pair % 2 == 0 else both[::-1])]
        found.append(tuple(took if pair % 2 == 0 else took[::-1]))
    return found


def _timed(f):
    """Seconds of the processor on a CPU, which other processes disturb least; of the clock on a GPU."""
    cuda = torch.cuda.is_available()
    clock = time.perf_counter if cuda else time.process_time
    if cuda:
        torch.cuda.synchronize()
    start = clock()
    f()
    if cuda:
        torch.cuda.synchronize()
    return clock() - start


class Live(TorchDispatchMode):
    """Bytes of the storages that were made in this context and are still alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.peak_at = ""
        self._known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in (x for x in tree_leaves(out) if isinstance(x, Tensor)):
            storage = x.untyped_storage()
            if storage._cdata not in given and storage not in self._known:
                self._known.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.nbytes())
        if self.now > self.peak:
            self.peak, self.peak_at = self.now, str(func)
        return out

    def _gone(self, size):
        self.now -= size


def memory(ready: Prepared, work: Work) -> dict[str, int]:
    """Bytes: the peak of an update, and the parts that it cannot do without; everything held before is counted."""
    policy, training = ready.policy, [call for call in work.calls if call.cotangent is not None]
    modules = (policy.pipe.transformer, policy.pipe.vae, policy.pipe.text_encoder, policy.pipe.text_encoder_2)
    held = {x.untyped_storage()._cdata: x.nbytes for m in modules for x in (*m.parameters(), *m.buffers())}
    for kept in policy.snapshots.state().values():
        held |= {x.untyped_storage()._cdata: x.nbytes for x in kept}
    states = ready.learner.optimizer.state.values()
    moments = sum(x.nbytes for state in states for x in state.values() if isinstance(x, Tensor))
    parts = {"weights and snapshots": sum(held.values()), "optimiser": moments}
    parts["gradients"] = sum(p.nbytes for p in ready.learner.parameters)
    parts["activations of a call"] = _activations(ready, max(training, key=lambda call: call.rows))
    parts["stored states"] = _stored_states(ready)
    with Live() as live:
        one_update(ready)
    return parts | {"peak": parts["weights and snapshots"] + moments + live.peak}


def _activations(ready, call):
    """Peak of one training call, forward and backward, beside the gradients of the weights."""
    with Live() as live:
        out = ready.policy.pipe.transformer(**call.arguments)[0]
        out.backward(call.cotangent)
        del out
        gradients = sum(p.grad.nbytes for p in ready.learner.parameters if p.grad is not None)
    ready.learner.optimizer.zero_grad(set_to_none=True)
    return max(live.peak - gradients, 0)


def _stored_states(ready):
    from flowrl import plan

    one = plan.count(ready.recipe, ready.policy.sigmas(ready.recipe.rollout.steps))
    return ready.run.budget.prompts_per_update * one.states_stored * 4 * int(torch.tensor(ready.policy.shape).prod())


def limit_of(parts: dict[str, int]) -> int:
    return sum(size for name, size in parts.items() if name != "peak")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["flow_grpo", "branch_grpo", "diffusion_nft"])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=12)
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    assert not Path("runs/bench_limit_writes_nothing").exists()
    for recipe in given.recipes:
        for train in ("full", "lora"):
            ready = prepared_for(recipe, train, given.prompts)
            one_update(ready)  # encodes the prompts and makes the optimiser's state
            work = record(ready)
            found = ratios(ready, work, given.pairs)
            each = sorted(a / b for a, b in found)
            middle = [statistics.median(x) for x in zip(*found, strict=True)]
            print(
                f"{recipe}, {train}: update / limit {statistics.median(each):.3f} ({each[0]:.3f} to {each[-1]:.3f}, "
                f"{given.pairs} pairs; {middle[0]:.2f} s and {middle[1]:.2f} s; {len(work.calls)} calls)"
            )
            parts = memory(ready, work)
            told = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in parts.items() if name != "peak")
            print(
                f"  peak {parts['peak'] / 2**20:.1f} MiB, {parts['peak'] / limit_of(parts):.3f} of: {told}", flush=True
            )


if __name__ == "__main__":
    main()
