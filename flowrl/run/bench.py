"""Recipes compared at equal compute, each in an ordinary run directory.

Compute is a number of network rows, forwards + 2 x backwards: a run makes as many updates as fit into it by plan.  It
may take fewer rows than planned, because those of advantage 0 are skipped; results hold what the log counted.

The runs lie in OUTPUT/RECIPE/seedN.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, cycle, takewhile
from pathlib import Path

import yaml

from flowrl import plan
from flowrl.part import nearest
from flowrl.recipes import catalogue
from flowrl.run import bench_results, config, files, scoring
from flowrl.run.bench_runs import Job, begun, finished, one_by_one, side_by_side
from flowrl.run.metrics import Progress, duration
from flowrl.run.prepare import pick_device, read_prompts
from flowrl.run.settings import Run
from flowrl.run.use import without_weights

COMPUTE = 600_000  # rows of one run
COUNTED = 16  # updates whose rows are counted one by one
EVALUATIONS = 6  # of a run at most, at even distances, beside the one before it
SMOKE = ("budget.prompts_per_update=2", "evaluation.prompts=6", "evaluation.others=0", "evaluation.samples=1")
OURS = ("recipe", "recipe.name", "budget.updates", "evaluation.every", "output")  # what bench fills in


def plan_jobs(
    file: str,
    overrides: Sequence[str],
    *,
    recipes: str,
    seeds: int | None,
    compute: int | None,
    output: Path,
    smoke: bool,
) -> list[Job]:
    """Every run of the comparison, checked; nothing is written.

    recipes: names with commas between them, or "all"
    seeds:   how many, counted from the run file's seed on; 3, or 1 with `smoke`
    compute: rows of one run, by default COMPUTE; `smoke` makes two updates instead
    """
    _check(overrides, seeds, compute, smoke)
    keys, path = _chosen(recipes), config.run_file(file)
    tuned = _tuned(path)
    jobs = []
    for key in keys:
        changes = [f"{k}={yaml.safe_dump(v, default_flow_style=True)}" for k, v in tuned.get(key, {}).items()]
        given = [f"recipe.name={key}", *changes, *(SMOKE if smoke else ()), *overrides]
        run = config.load(path, given)
        rows = rows_per_update(run, 2) if smoke else _rows_within(run, compute or COMPUTE, key)
        every = None if smoke else -(-len(rows) // EVALUATIONS)
        given += [f"budget.updates={len(rows)}", f"evaluation.every={'null' if smoke else every}"]
        for seed in range(run.seed, run.seed + (seeds or (1 if smoke else 3))):
            place = output / key / f"seed{seed}"
            jobs.append(Job(key, config.load(path, [*given, f"seed={seed}", f"output={place}"]), sum(rows)))
    _check_output(output, jobs)
    train_prompts, test, _, _ = read_prompts(jobs[0].run)
    declared = scoring.declare(jobs[0].run, {})
    scoring.load(declared, train_prompts + test, pick_device(jobs[0].run.model.device))
    return jobs


def _check(overrides, seeds, compute, smoke):
    for key in (override.partition("=")[0].strip() for override in overrides):
        if key in OURS:
            raise ValueError(f"{key} has no effect here: bench sets it. Give --recipes, --compute or --output.")
    if seeds is not None and seeds < 1:
        raise ValueError(f"--seeds = {seeds}: expected 1 or more.")
    if smoke and compute is not None:
        raise ValueError("--compute has no effect with --smoke, which makes two updates of each recipe.")


def _chosen(recipes):
    """The keys that were asked for, each once."""
    known = list(catalogue())
    keys = known if recipes == "all" else list(dict.fromkeys(key.strip() for key in recipes.split(",")))
    for key in keys:
        _known(key, known, "--recipes")
    return keys


def _known(key, known, where):
    if key not in known:
        raise ValueError(f"{where}: {key!r} is no recipe. {nearest(key, known)}Recipes: all, {', '.join(known)}.")


def _tuned(path: Path) -> Mapping[str, Mapping[str, object]]:
    """{recipe: {setting: value}} of recipes/NAME.yaml beside the run file NAME.yaml, if there is one."""
    beside = path.parent / "recipes" / path.name
    tuned = config.read(beside) if beside.is_file() else {}
    for key, changes in tuned.items():
        _known(key, list(catalogue()), str(beside))
        if not isinstance(changes, Mapping):
            raise ValueError(f"{beside}: {key} = {changes!r}: expected settings by dotted name.")
    return tuned


def rows_per_update(run: Run, updates: int) -> list[int]:
    """Rows of each of the first updates, forwards + 2 x backwards; a recipe that draws its steps varies a little."""
    recipe, groups, family = run.build_recipe(), run.budget.prompts_per_update, without_weights(run)
    grid, known = family.walk(recipe.rollout.steps, run.model.grid), {"pairs": not family.embeds_guidance()}
    counts = (plan.count(recipe, grid, seed=run.seed, iteration=i, **known) for i in range(updates))
    return [groups * (c.forwards + 2 * c.backwards) for c in counts]


def _rows_within(run, compute, key):
    """Rows of each update of as many as fit; beyond COUNTED they are taken to repeat."""
    counted = rows_per_update(run, COUNTED)
    spent = takewhile(lambda total: total <= compute, accumulate(cycle(counted)))
    rows = [one for one, _ in zip(cycle(counted), spent, strict=False)]
    if not rows:
        raise ValueError(
            f"--compute = {compute:,} is less than one update of {key}, which takes {counted[0]:,} rows "
            "(forwards + 2 x backwards). Raise it or lower budget.prompts_per_update."
        )
    return rows


def _check_output(output, jobs):
    """Refuse a folder that is not a bench's own."""
    if not output.exists():
        return files.check_output(output, "--output")
    foreign = output.is_file() or (any(output.iterdir()) and not (output / bench_results.FILE).is_file())
    if foreign:
        raise ValueError(f"--output = {str(output)!r} holds something else than a bench. Give another.")
    for job in jobs:
        if job.directory.exists() and not (job.directory / "run.yaml").is_file():
            raise ValueError(
                f"{str(job.directory)!r} holds something else than a run. Remove it or give another output."
            )


def check_at_once(wanted: int | None, smoke: bool) -> int:
    """How many runs at once: by default two on a CPU with two cores or more; one on a GPU, or of a few seconds each."""
    if wanted is None:
        return 1 if smoke or pick_device("auto") == "cuda" else min(2, os.cpu_count() or 1)
    if wanted < 1:
        raise ValueError(f"--jobs = {wanted}: expected 1 or more.")
    return wanted


def compare(jobs: Sequence[Job], output: Path, settings: Mapping[str, object], *, at_once: int) -> list[Job]:
    """Make the runs that are missing, keep the results up to date, and return the jobs with what failed."""
    output.mkdir(parents=True, exist_ok=True)
    settings = {**settings, "prompts": read_prompts(jobs[0].run)[2]}
    missing = [job for job in jobs if not finished(job)]
    progress = Progress(len(jobs), shown=True)
    progress.say(f"{len(jobs)} runs, {len(jobs) - len(missing)} of them finished before; {at_once} at once.")
    ended: dict[str, Job] = {}

    def tell(job: Job) -> None:
        ended[job.name] = job
        bench_results.write(output, [ended.get(j.name, j) for j in jobs], settings)
        progress.say(f"{job.name}: {job.error or 'done'}")

    bench_results.write(output, jobs, settings)
    watch = _overall(missing, ended, progress)
    if at_once == 1:
        one_by_one(missing, progress.say, tell, watch)
    else:
        side_by_side(missing, progress.say, tell, watch, at_once)
    return [ended.get(job.name, job) for job in jobs]


def _overall(missing, ended, progress) -> Callable[[Sequence[Job]], None]:
    """A line over all runs: how many ended, rows per second, time left, where those that run stand."""
    started = time.monotonic()
    before = {job.name: _progress(job, _lines_before(job)) for job in missing}
    total = sum(job.rows - before[job.name][0] for job in missing)

    def watch(running: Sequence[Job]) -> None:
        planned, rows = 0.0, 0
        for job in (job for job in missing if job.name in ended or job in running):
            done = _progress(job, bench_results.lines_of(job.directory))
            planned += (job.rows if job.name in ended else done[0]) - before[job.name][0]
            rows += done[1] - before[job.name][1]
        seconds = time.monotonic() - started
        left = duration(seconds * (total - planned) / planned) if planned > 0 else "?"
        text = f"bench: {len(ended)}/{len(missing)} runs  {rows / seconds:,.0f} rows/s  {left} left"
        for job in running:
            text += f"  {job.name} {max(len(bench_results.lines_of(job.directory)) - 1, 0)}/{job.run.budget.updates}"
        progress.renew(text, now=not running)

    return watch


def _lines_before(job):
    """The log up to the update that the run goes on from."""
    update = begun(job)
    return [] if update is None else bench_results.lines_of(job.directory)[: update + 1]


def _progress(job, lines):
    """(rows that were planned for the updates of a log, rows that these took)."""
    return job.rows * max(len(lines) - 1, 0) / job.run.budget.updates, bench_results.compute(lines)
