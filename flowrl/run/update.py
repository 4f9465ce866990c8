"""One update of a run: which prompts it trains on, what it cost on all processes, and what must not go unseen."""

import math
import time
from collections.abc import Mapping, Sequence

from torch import Tensor

from flowrl import randomness
from flowrl.allocation.prompts import balanced, shuffled
from flowrl.recipe import Recipe, Snapshot
from flowrl.run import prompts
from flowrl.run.prepare import Prepared
from flowrl.run.profile import Clock
from flowrl.run.settings import Run
from flowrl.visual import trainer
from flowrl.visual.policy import Example

TERMS = ("objective/", "penalty/")  # of the loss; each process logs its share
SHARES = (*TERMS, "ratio/distance", "ratio/clipped")  # what else sums over processes, weighted as the loss is
LARGEST = ("ratio/deviation", "snapshot/")  # the same names on every process
AVERAGED = "ema"  # the snapshot that optimizer.ema asks for


def snapshots(prepared: Prepared) -> Mapping[str, Snapshot]:
    """The recipe's snapshots, and the averaged weights if they are on."""
    return dict(prepared.recipe.snapshots) | ({AVERAGED: prepared.ema} if prepared.ema else {})


def watched(prepared: Prepared) -> Clock:
    """A clock over the parts that an update cannot do without."""
    clock = Clock()
    clock.watch(prepared.policy, "velocity", "network")
    clock.watch(prepared.learner, "backward", "network")
    clock.watch(prepared.policy, "decode", "decode")
    clock.watch(prepared.learner, "step", "optimiser")
    clock.watch(prepared.processes, "gather", "waiting")  # for the slowest process
    return clock


def update(
    prepared: Prepared, iteration: int, memory: Mapping[str, Tensor], clock: Clock | None
) -> tuple[dict, Mapping[str, Tensor]]:
    """(log of one update and what it cost, summed over processes; what is remembered after it)."""
    run, policy = prepared.run, prepared.policy
    began, before = time.monotonic(), (policy.forwards, policy.backwards)
    if clock:
        clock.seconds.clear()  # what an evaluation took

    recipe = prepared.recipe
    chosen, roots = prompts_of(run, recipe, prepared.train, iteration, memory)
    examples = [prepared.train[i] for i in chosen]
    log, memory = trainer.update(
        policy,
        recipe,
        examples,
        clock.timed("reward", prepared.score) if clock else prepared.score,
        prepared.learner,
        seed=run.seed,
        iteration=iteration,
        batch_size=run.budget.batch_size,
        prompts=chosen,
        roots=roots,
        memory=memory,
        ranks=prepared.processes.ranks(),
    )
    if prepared.ema:
        policy.snapshot(AVERAGED, prepared.ema, iteration + 1)
    log = _over_processes(prepared, log, before)
    refuse_nan(log, iteration + 1, examples)
    if "nonfinite_parameter" in log:
        log["nonfinite_prompts"] = [e.prompt for e in examples]
    return log | _timing(time.monotonic() - began, clock), memory


def prompts_of(
    run: Run, recipe: Recipe, train: Sequence[Example], iteration: int, memory: Mapping[str, Tensor]
) -> tuple[list[int], list[int] | None]:
    """(places of the prompts of an update, or with a pilot of its candidates; roots of each, None: the recipe's)."""

    def permutation(*name):
        return randomness.generator(run.seed, "prompts", *name)

    per_update = run.budget.prompts_per_update
    candidates = per_update * (recipe.pilot.number("candidates") if recipe.pilot else 1)
    if recipe.allocate:
        known = {"count": len(train), "per_update": per_update, "roots": recipe.rollout.roots, "memory": memory}
        return recipe.allocate(**known, generator=randomness.generator(run.seed, iteration, "allocation"))
    if run.data.balance:
        return balanced(prompts.kinds(train), candidates, iteration, permutation), None
    return shuffled(len(train), candidates, iteration, permutation), None


def _over_processes(prepared, log, before):
    """Sums of what is additive (loss terms, rows), the largest deviation; the rest is the same everywhere."""
    policy, processes = prepared.policy, prepared.processes
    counts = {"forwards": policy.forwards - before[0], "backwards": policy.backwards - before[1]}
    counts |= {name: log[name] for name in ("rollout_calls", "train_calls")}
    additive = counts | {name: x for name, x in log.items() if name.startswith(SHARES)}
    log |= dict(zip(additive, processes.sum(list(map(float, additive.values()))), strict=True))
    log |= {name: int(log[name]) for name in counts}
    for name in (name for name in log if name.startswith(LARGEST)):
        log[name] = processes.largest(log[name])
    return log


def refuse_nan(log: Mapping[str, object], update: int, examples: Sequence[Example]) -> None:
    """A term of the loss that is not a number stops the run, on every process alike."""
    for name in (name for name, x in log.items() if name.startswith(TERMS) and math.isnan(x)):
        shown = "; ".join(e.prompt for e in examples[:4])
        raise RuntimeError(f"update {update}: {name} is nan, so the run stops. {len(examples)} prompts: {shown}")


def _timing(seconds, clock):
    shares = clock.shares(seconds) if clock else {}
    return {"seconds": seconds} | {f"time/{part}": share for part, share in shares.items()}
