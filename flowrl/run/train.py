"""A run from the first evaluation to the last."""

import math
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from flowrl.run import checkpoint, directory, files, out_of_memory, resume
from flowrl.run.evaluation import described, evaluate, said
from flowrl.run.metrics import Metrics, Progress, read_lines
from flowrl.run.peers import PeerLost
from flowrl.run.prepare import Prepared, evaluation_settings
from flowrl.run.sharding import in_host_memory, whole
from flowrl.run.signs import Signs
from flowrl.run.stopping import Stopped, Stopping
from flowrl.run.trackers import Trackers
from flowrl.run.update import snapshots, update, watched
from flowrl.visual.policy import uncounted


@dataclass(frozen=True)
class Result:
    """What `flowrl.align` returns: the pipeline with the weights last evaluated, the log, and where everything lies."""

    pipeline: object
    metrics: list[dict]
    directory: Path


@dataclass
class Standing:
    """Where a run stands between two updates; every checkpoint holds it."""

    update: int = 0  # complete ones
    pending: dict | None = None  # log of the last update while it is not written, because its evaluation is not done
    best: float | None = None  # score of the best evaluation
    best_update: int | None = None
    stale: int = 0  # evaluations since the best


def train(prepared: Prepared) -> Result:
    """Evaluate, update, evaluate at times, and leave behind a run directory; see the README for what lies in it."""
    with Stopping() as stopping:
        training = Training(prepared, stopping)
        training.open()
        try:
            training.run()
        except (Stopped, RuntimeError) as fault:
            alone = prepared.processes.count == 1  # with others, it may be that one of them has gone already
            if stopping.signal is None and (lost := prepared.processes.lost(fault)):
                raise training.left_alone(lost) from fault
            if stopping.signal is None or (alone and not isinstance(fault, Stopped)):
                training.leave()
                raise
            raise training.stopped(together=isinstance(fault, Stopped)) from None
        except Exception:
            training.leave()
            raise
        finally:
            training.trackers.close()
    return Result(prepared.policy.pipe, training.metrics.lines, training.directory)


class Training:
    """One run: where it stands, its log and its checkpoints."""

    def __init__(self, prepared: Prepared, stopping: Stopping):
        self.prepared, self.stopping = prepared, stopping
        self.directory = Path(prepared.run.output)
        self.memory: Mapping[str, torch.Tensor] = {}  # what the recipe's tracker keeps
        self.standing = Standing(
            pending={"iteration": 0, "seconds": 0.0, "elapsed": 0.0, "forwards": 0, "backwards": 0}
        )
        self.saved: int | None = None  # update of the last checkpoint
        self.progress = Progress(prepared.run.budget.updates, shown=prepared.processes.main)
        out_of_memory.watch(prepared)
        self.clock = watched(prepared) if prepared.run.profile else None
        stopping.watch(prepared.policy, "velocity", prepared.processes.agree)

    def run(self) -> None:
        """From where it stands to its end."""
        standing, updates = self.standing, self.prepared.run.budget.updates
        if standing.pending:
            self.close(standing.pending)
        self.began = time.monotonic() - self.metrics.lines[-1]["elapsed"]
        self.progress.begin(standing.update)
        while standing.update < updates and not self.over:
            self.close(self.update())
        self.writer.wait()
        if self.over:
            self.progress.say(
                f"no new best in {standing.stale} evaluations since update {standing.best_update}: the run ends after "
                f"update {standing.update} (evaluation.patience)."
            )
        if self.prepared.processes.main:
            directory.finish(
                self.prepared, self.directory, self.progress, self.metrics.lines[0], self.metrics.lines[-1]
            )
        self.prepared.processes.wait()

    def open(self) -> None:
        """Make the directory, or go on with it."""
        prepared, found = self.prepared, self.prepared.origin.found
        lines = self._read(found) if found else None
        prepared.processes.wait()  # until every process has seen the directory as it was
        if prepared.processes.main and found:
            directory.go_on(prepared, self.directory, self.standing.update)
        elif prepared.processes.main:
            directory.start(prepared, self.directory)
        prepared.processes.wait()
        self.metrics = Metrics(self.directory / "metrics.jsonl" if prepared.processes.main else None, lines)
        self.signs = Signs(prepared.recipe, self.metrics.lines)
        for line in prepared.warnings:
            self.warn(line)
        for name, rule in snapshots(prepared).items():
            prepared.policy.snapshot(name, rule, 0)
        folder, kept = self.directory / "checkpoints", prepared.run.checkpoint.keep
        self.writer = checkpoint.Writer(folder, kept, self.standing.update)
        for line in directory.overview(prepared):
            self.progress.say(line)
        if found:
            self._restore(found)
        names = prepared.run.log.trackers if prepared.processes.main else ()
        settings = prepared.run.model_dump(mode="json")
        self.trackers = Trackers(names, self.directory, settings, len(self.metrics.lines), self.warn)

    def _read(self, found):
        """Where the checkpoint stands; the lines of the log that lead there."""
        self.standing = standing = Standing(**found.facts["standing"])
        lines = read_lines(self.directory / "metrics.jsonl", standing.update - (standing.pending is not None))
        if not resume.best_stands(found, self.prepared.run):
            standing.best, standing.best_update, standing.stale = None, None, 0
        done = standing.update >= self.prepared.run.budget.updates
        if done and not standing.pending and not any(name.startswith("eval/") for name in lines[-1]):
            standing.pending = lines.pop()  # fewer updates than before: the last one is evaluated now
        return lines

    def _restore(self, found):
        policy, standing = self.prepared.policy, self.standing
        self.memory = checkpoint.restore(checkpoint.read(found.path), found.facts, policy, self.prepared.learner)
        self.saved = standing.update
        norm = float(torch.stack([whole(p.detach().norm()) for _, p in policy.trainable()]).norm())
        averaged = ", averaged weights restored" if self.prepared.ema else ""
        counts = (found.facts["processes"], self.prepared.processes.count)
        others = f", with {counts[1]} processes after {counts[0]}" if counts[0] != counts[1] else ""
        kept = [name for name in policy.snapshots.state() if name != "ema"]
        snapshots = f", snapshots {', '.join(kept)}" if kept else ""
        self.progress.say(
            f"resumed after update {standing.update}, |weights| = {norm:.8g}, optimizer at step "
            f"{self.prepared.learner.updates}{averaged}{snapshots}{others}"
        )

    def warn(self, text: str) -> None:
        self.progress.say(f"warning: {text}")

    @property
    def over(self) -> bool:
        """Whether patience has come to its end."""
        patience = self.prepared.run.evaluation.patience
        return patience is not None and self.standing.stale >= patience

    def update(self) -> dict:
        """One update, and what it says."""
        done = self.standing.update + 1
        log, self.memory = update(self.prepared, done - 1, self.memory, self.clock)
        log = {"iteration": done, "seconds": log.pop("seconds"), "elapsed": time.monotonic() - self.began} | log
        if "nonfinite_parameter" in log:
            self.warn(
                f"update {done} skips an optimizer step, the gradient of {log['nonfinite_parameter']} is not finite; "
                f"prompts: {'; '.join(log['nonfinite_prompts'])}"
            )
        self.progress.update(done, directory.headline(log))
        self.standing.update = done
        return log

    def close(self, log: Mapping) -> None:
        """End an update: evaluate, write its line and a checkpoint, as far as they are due."""
        standing, run = self.standing, self.prepared.run
        standing.pending, best = dict(log), False
        done, every = standing.update, run.evaluation.every
        if done in (0, run.budget.updates) or (every and done % every == 0):
            log = {**log, **_evaluate(self.prepared, self.directory, done, self.progress)}
            best = self._judge(log)
        for text in self.signs.new(self.metrics.lines, log):
            self.warn(text)
        self.metrics.write(log)
        grid = directory.pictures(self.directory, done)
        self.trackers.log(self.metrics.lines[-1], grid if "evaluation" in log else None)
        standing.pending = None
        asked = self.prepared.processes.largest(float(self.stopping.wanted)) > 0
        if best or asked or self.over or done == run.budget.updates or done % run.checkpoint.every == 0:
            self.save()
        if asked:
            self.stopping.wanted = False
            self.progress.say(f"checkpoint of update {done}, as the signal asked")
        self.writer.check()

    def _judge(self, log):
        """Whether this evaluation is the best so far."""
        name, standing = self.prepared.run.checkpoint.best, self.standing
        score = log[name] if name else sum(w * log[f"eval/{n}"] for n, w in self.prepared.weights.items() if w)
        best = not math.isnan(score) and (standing.best is None or score > standing.best)
        if best:
            standing.best, standing.best_update = score, standing.update
        standing.stale = 0 if best else standing.stale + 1
        return best

    def save(self) -> None:
        """Copy the state on every process; the main one writes it in the background."""
        prepared, processes = self.prepared, self.prepared.processes
        groups = checkpoint.capture(prepared.policy, prepared.learner, self.memory, keep=processes.main)
        self.saved = self.standing.update
        if processes.main:
            self.metrics.sync()
            page = {"recipe.txt": prepared.origin.page}
            self.writer.save(groups, self._facts(), page, self.standing.best_update)

    def _facts(self):
        prepared = self.prepared
        return {
            "update": self.standing.update,
            "standing": asdict(self.standing),
            "learner": prepared.learner.counters(),
            "settings": prepared.run.model_dump(mode="json"),
            "fingerprints": prepared.origin.prints,
            "versions": prepared.origin.versions,
            "sigmas": prepared.policy.sigmas(prepared.recipe.rollout.steps).tolist(),
            "processes": prepared.processes.count,
        }

    def stopped(self, together: bool) -> Stopped:
        """Checkpoint the last complete update, if the weights are still its, and say how to go on.

        together: all processes have stopped at the same call, and can put shards together
        """
        done, said, processes = self.standing.update, "", self.prepared.processes
        if together if processes.sharded else processes.main:
            try:
                if self.saved != done and self.prepared.learner.updates == done:
                    self.save()
                self.writer.wait()
            except RuntimeError as fault:
                said = f" {fault}"
        return self.stopping.stopped(f"interrupted; {self._kept()}.{said} Go on with: {self._command()}")

    def leave(self) -> None:
        """Take a directory away in which nothing stands yet, so that the next try may have its name."""
        if self.prepared.processes.main and not self.metrics.lines and self.saved is None:
            shutil.rmtree(self.directory)

    def left_alone(self, lost: PeerLost) -> PeerLost:
        """Wait for the checkpoint that is being written; no other one, since a device may hang in a broken sum."""
        if not self.prepared.processes.main:
            return lost
        said = ""
        try:
            self.writer.wait()
        except RuntimeError as fault:
            said = f" {fault}"
        return PeerLost(f"{lost} {self._kept().capitalize()}.{said} Go on with: {self._command()}")

    def _kept(self):
        return f"{'nothing' if self.writer.newest is None else f'update {self.writer.newest}'} is checkpointed"

    def _command(self):
        processes, resume = self.prepared.processes, f"--resume {shlex.quote(str(self.directory))}"
        if processes.count == 1:
            return f"flowrl train {resume}"
        if processes.sharded or not processes.on_one_machine:
            return f"the command that started it, with {resume} in the place of the run file and its settings"
        script = shlex.quote(sys.argv[0])
        return f"accelerate launch --multi_gpu --num_processes {processes.count} {script} {resume}"


def evaluated(prepared):
    """Name of the weights that are scored, saved and left behind: the averaged ones if there are any."""
    return "ema" if prepared.ema else "current"


def _evaluate(prepared, folder, done, progress):
    """Score the held-out prompts with the weights that are saved: the averaged ones if there are any."""
    policy, run, processes = prepared.policy, prepared.run, prepared.processes
    settings = evaluation_settings(run, prepared.recipe)
    with policy.at(evaluated(prepared)), uncounted(policy):  # an update's rows are its own
        log, pictures = evaluate(
            policy,
            prepared.test,
            prepared.score_held_out,
            settings,
            processes.ranks(),
            main=prepared.trained_test,
            pictures=run.evaluation.pictures,
        )
        weights = in_host_memory(policy.weights(), keep=processes.main)
        if processes.main:
            files.replace_folder(folder / policy.folder, partial(policy.save, weights=weights))
    if processes.main:
        directory.save_pictures(pictures, directory.pictures(folder, done))
    means = {k: v for k, v in log.items() if k.count("/") == 1 and k != "eval/invalid"}
    description = described(settings, pictures, "averaged" if prepared.ema else "current", policy.frames)
    progress.say(
        f"evaluation after {done} updates: "
        + "  ".join(f"{k} {v:.4f}" for k, v in means.items())
        + f"  ({prepared.trained_test} prompts; {said(description)})"
    )
    return log | {"evaluation": description}
