"""A run from the first evaluation to the last."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from flowrl import plan, randomness
from flowrl.allocation.prompts import balanced, shuffled
from flowrl.explain import explain
from flowrl.recipes import catalogue, find
from flowrl.run import config, files, prompts
from flowrl.run.evaluation import evaluate
from flowrl.run.metrics import Metrics, Progress, duration
from flowrl.run.prepare import Prepared, evaluation_settings
from flowrl.run.profile import Clock
from flowrl.visual.trainer import update
from rewards import media


@dataclass(frozen=True)
class Result:
    """What `flowrl.align` returns: the pipeline with the weights last evaluated, the log, and where everything lies."""

    pipeline: object
    metrics: list[dict]
    directory: Path


def train(prepared: Prepared) -> Result:
    """Evaluate, update, evaluate at times, and leave behind a run directory; see the README for what lies in it."""
    run, policy, processes = prepared.run, prepared.policy, prepared.processes
    directory = Path(run.output)
    processes.wait()  # until every process has seen that the directory is free
    if processes.main:
        _start(prepared, directory)
    processes.wait()
    metrics = Metrics(directory / "metrics.jsonl" if processes.main else None)
    progress = Progress(run.budget.updates, shown=processes.main)
    for line in prepared.warnings:
        progress.say(f"warning: {line}")
    clock = _watched(prepared) if run.profile else None
    for name, rule in _snapshots(prepared).items():
        policy.snapshot(name, rule, 0)

    for line in _overview(prepared):
        progress.say(line)
    first, began = _evaluate(prepared, directory, 0, progress), time.monotonic()
    metrics.write({"iteration": 0, "seconds": 0.0, "elapsed": 0.0, "forwards": 0, "backwards": 0} | first)
    progress.begin()
    for iteration in range(run.budget.updates):
        log = _update(prepared, iteration, clock)
        done = iteration + 1
        log = {"iteration": done, "seconds": log.pop("seconds"), "elapsed": time.monotonic() - began} | log
        _warn_of_equal_groups(metrics.lines, log, progress)
        progress.update(done, _headline(log))
        every = run.evaluation.every
        if done == run.budget.updates or (every and done % every == 0):
            log |= _evaluate(prepared, directory, done, progress)
        metrics.write(log)
    _finish(prepared, directory, progress, first, metrics.lines[-1])
    policy.finish(_evaluated(prepared))
    processes.wait()
    return Result(policy.pipe, metrics.lines, directory)


def _warn_of_equal_groups(lines, log, progress, *, window=10):
    """Say it once, when for `window` updates more than half of the groups taught nothing."""
    shares = [line["group/zero_spread"] for line in [*lines[1:], log]]
    recent, before = shares[-window:], shares[-window - 1 : -1]
    if len(recent) == window and sum(recent) > window / 2 and not (len(before) == window and sum(before) > window / 2):
        progress.say(
            f"warning: {sum(recent) / window:.0%} of the groups of the last {window} updates had equal rewards and "
            "taught nothing. Raise rollout.roots or use a denser reward."
        )


def _start(prepared, directory):
    """Make the run directory; from here on something is written."""
    directory.mkdir(parents=True)
    (directory / "samples").mkdir()
    if prepared.texts:
        lines = [json.dumps({"prompt": text}) + "\n" for text in prepared.texts]
        Path(prepared.run.data.train).write_text("".join(lines), encoding="utf-8")
    (directory / "run.yaml").write_text(config.dump(prepared.run), encoding="utf-8")
    sigmas = prepared.policy.sigmas(prepared.recipe.rollout.steps).tolist()
    page = (
        explain(prepared.recipe, _docstring(prepared.run))
        + f"\n\n# sigmas ({prepared.run.model.grid} grid)\n{sigmas}\n"
    )
    (directory / "recipe.txt").write_text(page, encoding="utf-8")
    shown = [e.prompt for e in prepared.test[: prepared.run.evaluation.pictures]]
    (directory / "samples" / "prompts.txt").write_text("\n".join(shown) + "\n", encoding="utf-8")


def _docstring(run):
    name = str(run.recipe["name"])
    return find(name).__doc__ if name in catalogue() else f"{name}: a recipe given in Python."


def _overview(prepared):
    """What an update consists of, counted before it runs; the log holds the same numbers as they turned out."""
    run, recipe = prepared.run, prepared.recipe
    one = plan.count(recipe, prepared.policy.sigmas(recipe.rollout.steps), seed=run.seed)
    groups = run.budget.prompts_per_update
    changes = ", ".join(f"{k} = {v}" for k, v in run.recipe.items() if k != "name")
    trained = sum(p.numel() for _, p in prepared.policy.trainable())
    yield f"{run.recipe['name']}{f' with {changes}' if changes else ''}; {trained:,} trainable parameters"
    yield (
        f"an update: {groups} prompts x {one.leaves} leaves = {groups * one.leaves} pictures scored, "
        f"{groups * one.rollout_calls:,} network rows to draw them, {groups * one.train_calls:,} to train "
        f"{groups * one.train_edges:,} decisions, 1 optimizer step; {prepared.processes.count} process(es)"
    )


def _headline(log):
    """What the line of progress shows: the rewards, how far the weights moved, and invalid scores if there are any."""
    shown = {name: x for name, x in log.items() if name.startswith("reward/") or name == "param_delta_norm"}
    return {name: x for name, x in shown.items() if name != "reward/invalid" or x}


def _snapshots(prepared):
    """The recipe's snapshots, and the averaged weights if they are on."""
    return dict(prepared.recipe.snapshots) | ({"ema": prepared.ema} if prepared.ema else {})


def _evaluated(prepared):
    """Name of the weights that are scored, saved and left behind: the averaged ones if there are any."""
    return "ema" if prepared.ema else "current"


def _watched(prepared):
    """A clock over the parts that an update cannot do without."""
    clock = Clock()
    clock.watch(prepared.policy, "velocity", "network")
    clock.watch(prepared.learner, "backward", "network")
    clock.watch(prepared.policy, "decode", "decode")
    clock.watch(prepared.learner, "step", "optimiser")
    clock.watch(prepared.processes, "gather", "waiting")  # for the slowest process
    return clock


def _update(prepared, iteration, clock):
    """One update and what it cost, summed over processes."""
    run, policy = prepared.run, prepared.policy
    began, before = time.monotonic(), (policy.forwards, policy.backwards)
    if clock:
        clock.seconds.clear()  # what an evaluation took

    def permutation(*name):
        return randomness.generator(run.seed, "prompts", *name)

    if run.data.balance:
        chosen = balanced(prompts.kinds(prepared.train), run.budget.prompts_per_update, iteration, permutation)
    else:
        chosen = shuffled(len(prepared.train), run.budget.prompts_per_update, iteration, permutation)
    log = update(
        policy,
        prepared.recipe,
        [prepared.train[i] for i in chosen],
        clock.timed("reward", prepared.score) if clock else prepared.score,
        prepared.learner,
        seed=run.seed,
        iteration=iteration,
        batch_size=run.budget.batch_size,
        ranks=prepared.processes.ranks(),
    )
    for name, rule in _snapshots(prepared).items():
        policy.snapshot(name, rule, iteration + 1)
    return _over_processes(prepared, log, before) | _timing(time.monotonic() - began, clock)


def _over_processes(prepared, log, before):
    """Sums of what is additive (loss terms, rows), the largest deviation; the rest is the same everywhere."""
    policy, processes = prepared.policy, prepared.processes
    counts = {"forwards": policy.forwards - before[0], "backwards": policy.backwards - before[1]}
    counts |= {name: log[name] for name in ("rollout_calls", "train_calls")}
    additive = counts | {name: x for name, x in log.items() if name.startswith(("objective/", "penalty/"))}
    log |= dict(zip(additive, processes.sum(list(map(float, additive.values()))), strict=True))
    log |= {name: int(log[name]) for name in counts}
    log["ratio/deviation"] = processes.largest(log["ratio/deviation"])
    return log | {"on_policy": True}


def _timing(seconds, clock):
    shares = clock.shares(seconds) if clock else {}
    return {"seconds": seconds} | {f"time/{part}": share for part, share in shares.items()}


def _evaluate(prepared, directory, done, progress):
    """Score the held-out prompts with the weights that are saved: the averaged ones if there are any."""
    policy, settings, processes = (
        prepared.policy,
        evaluation_settings(prepared.run, prepared.recipe),
        prepared.processes,
    )
    before = policy.forwards
    with policy.at(_evaluated(prepared)):
        log, pictures = evaluate(
            policy,
            prepared.test,
            prepared.score,
            settings,
            processes.ranks(),
            main=prepared.trained_test,
            pictures=prepared.run.evaluation.pictures,
        )
        if processes.main:
            files.replace_folder(directory / policy.folder, policy.save)
    policy.forwards = before  # an update's rows are its own
    if processes.main:
        _picture(prepared, pictures, directory / "samples" / f"{done:06d}.png")
    means = {k: v for k, v in log.items() if k.count("/") == 1 and k != "eval/invalid"}
    weights = "averaged weights" if prepared.ema else "current weights"
    size = (policy.shape[1] * policy.pipe.vae_scale_factor,) * 2
    progress.say(
        f"evaluation after {done} updates: "
        + "  ".join(f"{k} {v:.4f}" for k, v in means.items())
        + f"  ({prepared.trained_test} prompts, ODE, {settings.steps} steps, guidance {settings.guidance:g}, "
        f"{size[1]}x{size[0]}, {weights})"
    )
    return log


def _picture(prepared, pictures: Tensor, path: Path):
    scale = max(96 // pictures.shape[-1], 1)
    media.save_png(media.picture_grid(pictures, columns=6, scale=scale), path)


def _finish(prepared, directory, progress, first, last):
    """Say what changed and where everything lies."""
    if not prepared.processes.main:
        return
    final = f"{prepared.run.budget.updates:06d}.png"
    pictures = [directory / "samples" / name for name in ("000000.png", final)]
    media.before_after(*pictures, directory / "before_after.png")
    progress.say(f"{'':<34}{'before':>9}{'after':>9}{'change':>9}")
    for name in (n for n in first if n.startswith("eval/") and n != "eval/invalid"):
        tags = prepared.run.data.tags
        note = "  (not trained)" if tags and name.count("/") == 2 and name.rpartition("/")[2] not in tags else ""
        progress.say(f"{name:<34}{first[name]:9.3f}{last[name]:9.3f}{last[name] - first[name]:+9.3f}{note}")
    progress.say(
        f"{prepared.run.budget.updates} updates in {duration(last['elapsed'])}. Everything lies in {directory}:"
    )
    progress.say(
        f"  {prepared.policy.folder}/ (for diffusers), metrics.jsonl, samples/, before_after.png, run.yaml, recipe.txt"
    )
