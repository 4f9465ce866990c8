"""A policy without learning: count, evaluate, draw."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from flowrl import plan as plans
from flowrl.part import nearest
from flowrl.run import checkpoint, files, fingerprint, resume, scoring
from flowrl.run.checkpoint import Found
from flowrl.run.config import load, resolve
from flowrl.run.estimate import Memory, memory, too_large
from flowrl.run.evaluation import described
from flowrl.run.evaluation import evaluate as score_prompts
from flowrl.run.evaluation import sample as draw
from flowrl.run.guidance import sample_guided, step_kernel
from flowrl.run.prepare import evaluation_settings, load_policy, pick_device, read_prompts
from flowrl.run.processes import Processes
from flowrl.run.settings import Run
from flowrl.visual.pipelines import blueprint, opening
from flowrl.visual.pipelines.family import Family
from flowrl.visual.policy import Example, Policy
from rewards import media


@dataclass(frozen=True)
class Plan:
    """What a run will do and need, without touching a network."""

    table: dict[str, dict[str, int]]  # {quantity: {"per_prompt", "per_update", "total"}}, evaluation not counted
    memory: Memory
    rows: int  # forwards + 2 x backwards of all updates
    lines: list[str]  # what else is to be said


def plan(file: str, overrides: Sequence[str], gpu_memory: float | None = None) -> Plan:
    """Of a run file; a model that is not there is that of its name in flowrl/visual/architectures.

    gpu_memory: GiB that the run has to fit in
    """
    run = load(file, overrides)
    recipe, family = run.build_recipe(), without_weights(run)
    grid, lines = family.walk(recipe.rollout.steps, run.model.grid), []
    prompts, updates = run.budget.prompts_per_update, run.budget.updates
    plans.check_all(recipe, grid, seed=run.seed, updates=updates)
    if resolve(run.data.train).is_file():
        plans.check_allocation(recipe, len(read_prompts(run)[0]), prompts)
    else:
        lines.append(f"data.train = {run.data.train!r} is not there: its prompts are not checked.")
    counts = asdict(plans.count(recipe, grid, prompts=prompts, seed=run.seed, pairs=not family.embeds_guidance()))
    table = {
        name: {
            "per_prompt": round(counts[name] / prompts),
            "per_update": counts[name],
            "total": counts[name] * updates,
        }
        for name in counts
    }
    steps = counts["optimizer_steps"]  # each sees all prompts
    table["optimizer_steps"] = {"per_prompt": steps, "per_update": steps, "total": steps * updates}
    found = memory(run, recipe, family.pipe, family)
    table["trainable_parameters"] = dict.fromkeys(("per_prompt", "per_update", "total"), found.trained)
    lines += too_large(found, run, gpu_memory) if gpu_memory else []
    rows = table["forwards"]["total"] + 2 * table["backwards"]["total"]
    return Plan(table, found, rows, lines)


def without_weights(run: Run) -> Family:
    """The run's pipeline on the meta device, as its settings draw with it."""
    blue = blueprint.read(resolve(run.model.path), run.model.adapter)
    return blue.family(blue.pipe, **{name: getattr(run.model, name) for name in opening.DRAWN})


def evaluation(file: str, overrides: Sequence[str], weights: Path | None) -> Callable[[], dict[str, object]]:
    """Prepare to score the held-out prompts of a run file; the function returned does it."""
    run = load(file, overrides)
    train, test, main, _ = read_prompts(run)
    declared = scoring.declare(run, {})
    processes = Processes(pick_device(run.model.device))
    score = scoring.make_score(scoring.load(declared, train + test, processes.device), train + test)
    policy = _policy(run, weights, processes.device)
    settings = evaluation_settings(run, run.build_recipe())

    def run_it():
        log, none = score_prompts(policy, test, score, settings, processes.ranks(), main=main, pictures=0)
        drawn_by = "base" if weights is None else str(weights)
        return log | {"evaluation": described(settings, none, drawn_by, policy.frames)}

    return run_it


def sample(
    file: str, overrides: Sequence[str], prompts: Sequence[str], weights: Path | None, to: Path, guide: int = 1
) -> str:
    """Write a grid of pictures, a row per prompt if there are several samples, and say where; of videos one that moves.

    guide: draws of every step, of which the run's rewards choose one; 1: no guidance, and along the ODE
    """
    run = load(file, overrides)
    files.check_output(to, "--to")
    if guide < 1:
        raise ValueError(f"--guide {guide}: expected 1 or more draws of every step.")
    examples = [Example(p) for p in prompts] or read_prompts(run)[1][: run.evaluation.pictures]
    recipe, device = run.build_recipe(), Processes(pick_device(run.model.device)).device
    settings = evaluation_settings(run, recipe)
    if guide > 1:
        kernel = step_kernel(recipe)
        score = scoring.make_score(scoring.load(scoring.declare(run, {}), examples, device), examples)
    policy = _policy(run, weights, device)
    if guide > 1:
        pictures = sample_guided(policy, examples, settings, kernel, score, count=guide)
    else:
        pictures = draw(policy, examples, settings)
    columns = run.evaluation.samples if run.evaluation.samples > 1 else min(8, len(pictures))
    to.absolute().parent.mkdir(parents=True, exist_ok=True)
    frames = pictures.transpose(0, 1) if policy.frames > 1 else pictures[None]
    scale = max(96 // pictures.shape[-1], 1)
    media.save_moving([media.picture_grid(frame, columns=columns, scale=scale) for frame in frames], to)
    return f"{len(pictures)} {'videos' if policy.frames > 1 else 'pictures'} of {len(examples)} prompts in {to}"


def export(directory: Path, to: Path, which: str, merge: bool) -> Callable[[], str]:
    """Prepare to write the weights of a checkpoint, the averaged ones if there are any, for plain diffusers.

    which: the update of a checkpoint, "last" or "best"
    merge: a whole pipeline instead of an adapter
    """
    run = resume.load(directory, ())
    if merge and run.model.train == "full":
        raise ValueError("--merge has no effect: the run trains full weights, which are a whole pipeline already.")
    files.check_output(to, "--to")
    found = _chosen(directory, run, which)
    models = ({"model.path": x["model.path"]} for x in (found.facts["fingerprints"], fingerprint.take(run)))
    if fault := fingerprint.difference(*models):
        raise ValueError(f"{fault}. The weights belong to the model that was trained.")
    whole = {"quantize": None} | ({"dtype": "float32"} if merge else {})  # weights are added without a rounding
    run = run.model_copy(update={"model": run.model.model_copy(update=whole)})
    policy = _policy(run, None, Processes(pick_device(run.model.device)).device)

    def run_it():
        groups = checkpoint.read(found.path)
        averaged = run.optimizer.ema is not None
        checkpoint.load_weights(checkpoint.averaged(groups, "ema") if averaged else groups["weights"], policy)
        if merge:
            policy.merge()
        files.replace_folder(to, policy.save)
        what = "whole pipeline" if policy.folder == "model" else "adapter"
        return f"{'averaged' if averaged else 'current'} weights after update {found.facts['update']}: {what} in {to}"

    return run_it


def _chosen(directory: Path, run: Run, which: str) -> Found:
    """The checkpoint of an update, the last one, or the one with the best evaluation."""
    found, _ = resume.find(run)
    if which == "last":
        return found
    if which != "best" and not which.isdigit():
        raise ValueError(f"--checkpoint {which!r}: {nearest(which, ('best', 'last'))}Accepted: best, last, an update.")
    update = found.facts["standing"]["best_update"] if which == "best" else int(which)
    if update is None:
        raise ValueError("--checkpoint best: no evaluation of this run has a score.")
    return checkpoint.numbered(directory / "checkpoints", update)


def _policy(run: Run, weights: Path | None, device: torch.device) -> Policy:
    policy = load_policy(run, device)
    if weights is not None:
        policy.load(weights)
    return policy
