"""The runs of a comparison, one after another or some side by side.

One that is finished is not repeated, one that was interrupted goes on from its newest checkpoint, and one that was made
with other settings makes room.
"""

import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from flowrl.run import bench_results, checkpoint, config
from flowrl.run.prepare import prepare
from flowrl.run.settings import Run
from flowrl.run.train import train

PATIENCE = 60.0  # seconds in which interrupted runs write their last update

Say = Callable[[str], None]
Tell = Callable[["Job"], None]  # that a run has ended
Watch = Callable[[Sequence["Job"]], None]  # those that run now


@dataclass(frozen=True)
class Job:
    """One run of the comparison."""

    recipe: str
    run: Run
    rows: int  # planned; rows of advantage 0 are skipped, so a run may take fewer
    error: str = ""  # the line that it failed with

    @property
    def directory(self) -> Path:
        return Path(self.run.output)

    @property
    def name(self) -> str:
        return f"{self.recipe}/seed{self.run.seed}"


def is_same(job: Job) -> bool:
    """Whether the run directory holds a run of these very settings, wherever it was moved."""
    file = job.directory / "run.yaml"
    if not file.is_file():
        return False
    wanted, found = job.run.model_dump(mode="json"), yaml.safe_load(file.read_text(encoding="utf-8"))
    return {**wanted, "output": ""} == {**found, "output": ""}


def finished(job: Job) -> bool:
    """Whether the run directory holds this very run, trained and evaluated to its end."""
    lines = bench_results.lines_of(job.directory) if is_same(job) else []
    return bool(lines) and lines[-1]["iteration"] == job.run.budget.updates and "eval/total" in lines[-1]


def begun(job: Job) -> int | None:
    """The update that this very run goes on from; None where no checkpoint of it is whole."""
    found = checkpoint.newest(job.directory / "checkpoints")[0] if is_same(job) else None
    return found.facts["update"] if found else None


def one_by_one(jobs: Sequence[Job], say: Say, tell: Tell, watch: Watch) -> None:
    """In this process."""
    for job in jobs:
        resume = _make_room(job, say)
        try:
            train(prepare(job.run, resume=resume))
        except Exception as error:  # of one run, whatever it is; the others go on, and its traceback is kept
            _log(job).write_text(traceback.format_exc(), encoding="utf-8")
            job = replace(job, error=f"failed: {' '.join(str(error).split()) or type(error).__name__}")
        tell(job)
        watch([])


def side_by_side(jobs: Sequence[Job], say: Say, tell: Tell, watch: Watch, at_once: int) -> None:
    """Processes of one thread each; what they say goes to a file beside their run directory."""
    waiting, running = list(jobs), {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                running[job.name] = (job, _start(job, _make_room(job, say)))
            for name, (job, process) in list(running.items()):
                if process.poll() is not None:
                    del running[name]
                    tell(replace(job, error=f"failed: {_last_words(job)}") if process.returncode else job)
            watch([job for job, _ in running.values()])
            time.sleep(0.2)
    except KeyboardInterrupt:
        say(f"interrupted; {', '.join(running)} may take up to {PATIENCE:g} s to write the last update.")
        _wait([process for _, process in running.values()])
        raise KeyboardInterrupt("interrupted. The same command goes on.") from None
    finally:
        for _, process in running.values():
            process.terminate()


def _wait(processes):
    """Until all have stopped by themselves: Ctrl-C has reached them as well, and a second signal would cut them off."""
    deadline = time.monotonic() + PATIENCE
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)


def _make_room(job: Job, say: Say) -> bool:
    """Whether the run goes on; otherwise there is room for it now."""
    if (update := begun(job)) is not None:
        say(f"{job.name}: goes on after update {update}")
        return True
    if job.directory.exists() and not is_same(job):
        say(f"{job.name}: a run with other settings lay here; it is removed and made anew")
    shutil.rmtree(job.directory, ignore_errors=True)
    job.directory.parent.mkdir(parents=True, exist_ok=True)
    return False


def _start(job: Job, resume: bool) -> subprocess.Popen:
    file = job.directory.with_suffix(".yaml")
    file.write_text(config.dump(job.run), encoding="utf-8")
    here = str(Path(__file__).resolve().parents[2])  # -P: no file of the working directory shadows a package
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    asked = ["--resume", str(job.directory)] if resume else [str(file)]
    with _log(job).open("w", encoding="utf-8") as log:
        command = [sys.executable, "-P", "-m", "flowrl.run.cli", "train", *asked]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _log(job: Job) -> Path:
    return job.directory.with_suffix(".log")


def _last_words(job: Job) -> str:
    lines = _log(job).read_text(encoding="utf-8", errors="replace").split("\n")
    said = [line for line in lines if line.startswith("flowrl")] or [line for line in lines if line.strip()]
    return said[-1].partition("flowrl: ")[2] or said[-1] if said else "it said nothing"
