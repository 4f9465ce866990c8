"""What a comparison found: bench.json, a table with intervals in bench.md, and bench.svg.

A score is `eval/total`, the weighted sum of the held-out rewards over the trained kinds.
"""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev

from flowrl.run.chart import Line, chart

FILE = "bench.json"
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)
PACKAGES = ("torch", "diffusers", "transformers", "peft")


def lines_of(directory: Path) -> list[dict]:
    """The whole lines of a run's log; one that is being written is left out."""
    file = directory / "metrics.jsonl"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def compute(lines: Sequence[Mapping]) -> int:
    """Rows that the updates of a log took: forwards + 2 x backwards; evaluation is not counted."""
    return sum(line["forwards"] + 2 * line["backwards"] for line in lines)


def curve(lines: Sequence[Mapping]) -> list[tuple[int, float]]:
    """(compute so far, score) at every evaluation."""
    spent = accumulate(line["forwards"] + 2 * line["backwards"] for line in lines)
    return [(rows, line["eval/total"]) for rows, line in zip(spent, lines, strict=True) if "eval/total" in line]


def interval(values: Sequence[float]) -> float | None:
    """Half of the 95 % t-interval of the mean; None of a single value.  Beyond 17 values slightly too wide."""
    if len(values) < 2:
        return None
    return T95[min(len(values) - 1, len(T95)) - 1] * stdev(values) / len(values) ** 0.5


def write(output: Path, jobs: Sequence, settings: Mapping[str, object]) -> None:
    """Write what is known so far; every file is whole at any moment."""
    runs = [_entry(job) for job in jobs]
    about = {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    machine = {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count()}
    whole = {"settings": dict(settings), "versions": about, "machine": machine, "runs": runs}
    _replace(output / FILE, json.dumps(whole, indent=1) + "\n")
    done = by_recipe(runs)
    if done:
        _replace(output / "bench.svg", picture(done, settings))
        _replace(output / "bench.md", page(done, whole))


def _entry(job):
    lines = lines_of(job.directory)
    whole = bool(lines) and lines[-1]["iteration"] == job.run.budget.updates and "eval/total" in lines[-1]
    status = "failed" if job.error else "done" if whole else "pending"
    entry = {"recipe": job.recipe, "seed": job.run.seed, "status": status, "error": job.error}
    entry |= {"directory": str(job.directory), "updates": job.run.budget.updates, "planned": job.rows}
    entry |= {"changes": {k: v for k, v in job.run.recipe.items() if k != "name"}}
    entry |= {"learning_rate": job.run.optimizer.learning_rate}
    if status == "done":
        entry |= {"compute": compute(lines), "seconds": lines[-1]["elapsed"], "curve": curve(lines)}
        entry |= {when: _scores(line) for when, line in (("before", lines[0]), ("final", lines[-1]))}
    return entry


def _scores(line):
    return {name: x for name, x in line.items() if name.startswith("eval/")}


def _replace(file, text):
    new = file.with_name(f".{file.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(file)


def by_recipe(runs: Sequence[Mapping]) -> dict[str, list[Mapping]]:
    """{recipe: its finished runs}, the best mean score first."""
    done: dict[str, list[Mapping]] = {}
    for run in runs:
        if run["status"] == "done":
            done.setdefault(run["recipe"], []).append(run)
    return dict(sorted(done.items(), key=lambda item: -fmean(r["final"]["eval/total"] for r in item[1])))


def picture(done: Mapping[str, Sequence[Mapping]], settings: Mapping[str, object]) -> str:
    """Held-out score against compute: per recipe the mean over its seeds, and their range as a band."""
    lines = []
    for recipe, runs in sorted(done.items()):  # the colour of a recipe does not depend on its rank
        points = list(zip(*(run["curve"] for run in runs), strict=True))
        middle = [(fmean(x for x, _ in point), fmean(y for _, y in point)) for point in points]
        band = [(min(y for _, y in point), max(y for _, y in point)) for point in points] if len(runs) > 1 else ()
        lines.append(Line(recipe, middle, band))
    seeds = max(len(runs) for runs in done.values())
    return chart(
        lines,
        title="Held-out reward at equal compute",
        note=f"{_seeds(seeds)}; {settings['prompts']} held-out prompts of the trained kinds",
        x_label="network rows of training: forwards + 2 x backwards",
        y_label="weighted held-out reward",
    )


def _seeds(count):
    return "one seed" if count == 1 else f"mean and range over {count} seeds"


def page(done: Mapping[str, Sequence[Mapping]], whole: Mapping[str, object]) -> str:
    """bench.md: the settings, the table, the picture, and what failed."""
    settings, failed = whole["settings"], [run for run in whole["runs"] if run["status"] == "failed"]
    names = _columns(next(iter(done.values()))[0]["final"])
    head = ["recipe", "seeds", "updates", "rows", *(n.removeprefix("eval/") for n in names), "prompts +-", "s"]
    rows = [head, ["---"] * len(head)]
    first = next(iter(done.values()))[0]["before"]
    rows.append(["(before)", "", "0", "0", *(f"{first[n]:.3f}" for n in names), _error([first]), ""])
    rows += [_row(recipe, runs, names) for recipe, runs in done.items()]
    text = ["# Recipes at equal compute", "", *_said(whole), "", *(f"| {' | '.join(row)} |" for row in rows), ""]
    text += [
        "Mean over seeds +- half of its 95 % t-interval (n is the column `seeds`; with 3 the factor is 4.3 / sqrt(3)). "
        "`total` is the weighted sum of the rewards. `prompts +-` is the standard error of one run's total over its "
        f"{settings['prompts']} held-out prompts. `rows` are those that the log counted: forwards + 2 x backwards, "
        "evaluation left out. They are fewer than were planned where rows of advantage 0 are skipped.",
        "",
        "![held-out reward against compute](bench.svg)",
        "",
    ]
    text += [f"Failed: {run['recipe']}, seed {run['seed']}: {run['error']}\n" for run in failed]
    return "\n".join(text)


def _said(whole):
    """What was compared, and on what."""
    settings, machine = whole["settings"], whole["machine"]
    planned = max(run["planned"] for run in whole["runs"])
    changes = f" with {' '.join(settings['changes'])}" if settings["changes"] else ""
    yield f"Run file `{settings['run']}`{changes}; at most {planned:,} rows a run."
    yield ""
    used = ", ".join(f"{name} {number}" for name, number in whole["versions"].items())
    yield f"{machine['cores']} cores of {machine['processor']}, {used}."


def _columns(scores):
    """`total` first, the other means over all trained kinds, diversity; by kind they stand in bench.json."""
    means = [n for n in scores if n.count("/") == 1 and n not in ("eval/total", "eval/stderr", "eval/invalid")]
    return ["eval/total", *means]


def _row(recipe, runs, names):
    columns = [[run["final"][name] for run in runs] for name in names]
    middle = [f"{run:,.0f}" for run in (fmean(r["updates"] for r in runs), fmean(r["compute"] for r in runs))]
    shown = [f"{fmean(c):.3f}" + (f" +- {interval(c):.3f}" if len(c) > 1 else "") for c in columns]
    error = _error([run["final"] for run in runs])
    return [f"`{recipe}`", str(len(runs)), *middle, *shown, error, f"{fmean(r['seconds'] for r in runs):.0f}"]


def _error(scores):
    known = [s["eval/stderr"] for s in scores if "eval/stderr" in s]
    return f"{fmean(known):.3f}" if known else ""
