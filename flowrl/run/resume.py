"""Going on with a run: what has to be as it was, and what may change.

Free: budget.updates, evaluation.*, checkpoint.*, processes.*, log.*, profile, and where model and data lie (not what
they hold).  Other batch sizes are accepted with a warning, because sums in another order round otherwise, and so are
other versions of code and libraries.  All else is refused, and so is another budget.updates where the learning rate
follows a schedule over it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrl.run import checkpoint, config, fingerprint
from flowrl.run.checkpoint import Found
from flowrl.run.peers import versions
from flowrl.run.settings import Run

FREE = ("budget.updates", "evaluation.", "checkpoint.", "processes.", "log.", "profile", "output")
FREE += ("model.path", "data.train", "data.test")
ROUNDED = ("budget.batch_size", "budget.micro_batch")


def load(directory: Path, overrides: Sequence[str]) -> Run:
    """The run of a directory, with what changes."""
    if not (directory / "run.yaml").is_file():
        raise ValueError(f"--resume {str(directory)!r} is not the directory of a run: it has no run.yaml.")
    if any(override.partition("=")[0].strip() == "output" for override in overrides):
        raise ValueError(f"output has no effect with --resume: the run goes on in {str(directory)!r}.")
    run = config.load(directory / "run.yaml", overrides)
    return run.model_copy(update={"output": str(directory)})


def find(run: Run) -> tuple[Found, list[str]]:
    """(the checkpoint that the run goes on from, why newer ones are skipped)."""
    directory = Path(run.output)
    found, skipped = checkpoint.newest(directory / "checkpoints")
    if found is None:
        why = f" ({skipped[0].rstrip('.')})" if skipped else ""
        raise ValueError(
            f"{str(directory)!r} holds no whole checkpoint{why}: there is nothing to resume from. Start anew with "
            f"`flowrl train {directory / 'run.yaml'} output=ANOTHER`."
        )
    return found, skipped


@dataclass(frozen=True)
class Origin:
    """What a run is made from, and the checkpoint that it goes on from."""

    page: str  # the recipe, explained
    prints: Mapping[str, Mapping[str, str]]  # digests of data and model
    versions: Mapping[str, str]  # of the code that runs, as it was when it was loaded
    found: Found | None


def origin(run: Run, page: str, texts: Sequence[str], *, pipe: object, resume: bool) -> tuple[Origin, list[str]]:
    """The origin of a run, with warnings; ValueError where it cannot go on.  `texts`, `pipe`: as in fingerprint."""
    prints, now = fingerprint.take(run, texts, pipe), versions()
    if not resume:
        return Origin(page, prints, now, None), []
    found, skipped = find(run)
    told = check(found, run, page, prints) + other_versions(found.facts.get("versions", {}), now)
    return Origin(page, prints, now, found), skipped + told


def check(found: Found, run: Run, page: str, prints: Mapping) -> list[str]:
    """Warnings; ValueError with the first difference between the checkpoint and the run as it is now."""
    before, now = Run.model_validate(found.facts["settings"]), run
    changes = _changes(before, now)
    for name, (old, new) in changes.items():
        if name.startswith("recipe."):
            name, old, new = name.removeprefix("recipe."), json.dumps(old), json.dumps(new)
            raise ValueError(f'recipe changed since the checkpoint: "{name}={old}" is now "{name}={new}".')
        if not name.startswith(FREE) and name not in ROUNDED:
            raise ValueError(
                f"{name} = {new!r} was {old!r} when the run was checkpointed. A resumed run accepts other "
                "budget.updates, evaluation.* and checkpoint.*; start a new run for this."
            )
    _check_updates(found, before, now)
    _check_page((found.path / "recipe.txt").read_text(encoding="utf-8"), page)
    if fault := fingerprint.difference(found.facts["fingerprints"], prints):
        raise ValueError(f"{fault}. Put back what the run was started with, or start a new run.")
    rounded = [name for name in changes if name in ROUNDED]
    return [f"{name} changed: from here on the run is not the uninterrupted one bit by bit." for name in rounded]


def other_versions(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A warning that names what differs, if anything does; a checkpoint may be older than some of the names."""
    changes = [f"{n} {before.get(n, 'unknown')} is now {x}" for n, x in now.items() if before.get(n, "unknown") != x]
    said = "another version than in the checkpoint, so the run may not go on bit by bit as the uninterrupted one"
    return [f"{said}: {', '.join(changes)}."] if changes else []


def best_stands(found: Found, run: Run) -> bool:
    """Whether the best score so far can be compared with those to come: all are measured alike."""
    alike = ("evaluation.every", "evaluation.patience", "evaluation.pictures", "evaluation.others")
    changes = [n for n in _changes(Run.model_validate(found.facts["settings"]), run) if n not in alike]
    return not any(name.startswith("evaluation.") or name == "checkpoint.best" for name in changes)


def check_sigmas(found: Found, sigmas: list[float]) -> None:
    """C31: the schedule of the rollout is the one that the run was trained on."""
    before = found.facts["sigmas"]
    if before != sigmas:
        pairs = [(i, a, b) for i, (a, b) in enumerate(zip(before, sigmas, strict=False)) if a != b]
        i, a, b = pairs[0] if pairs else (min(len(before), len(sigmas)), "there", "missing")
        raise ValueError(f"the sigma table has changed since the checkpoint: sigma {i} was {a} and is now {b}.")


def page_of(text: str) -> list[str]:
    """The lines of a recipe page, without where in a file each function stands."""
    return [re.sub(r"   \(.*:\d+\)$", "", line) if line.startswith("# ") else line for line in text.splitlines()]


def _changes(before, now):
    """{dotted name: (old, new)} of the settings that differ."""
    old, new = (dict(_flat(run.model_dump(mode="json"))) for run in (before, now))
    names = [*old, *(name for name in new if name not in old)]
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}


def _flat(section, prefix=""):
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check_updates(found, before, now):
    done, updates, schedule = found.facts["update"], now.budget.updates, now.optimizer.schedule
    if updates < done:
        raise ValueError(f"budget.updates = {updates}: the run has done {done} already.")
    if updates != before.budget.updates and schedule != "constant":
        raise ValueError(
            f"budget.updates = {updates} was {before.budget.updates}: the {schedule} schedule is spread over them, so "
            "other rates would have led here. Only with optimizer.schedule = constant may their number change."
        )


def _check_page(before, now):
    old, new = page_of(before), page_of(now)
    for was, became in zip([*old, "(nothing)"], [*new, "(nothing)"], strict=False):
        if was != became:
            raise ValueError(f'recipe changed since the checkpoint: "{was.strip()}" is now "{became.strip()}".')
