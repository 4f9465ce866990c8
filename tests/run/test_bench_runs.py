"""The runs of a comparison: what is repeated, what goes on, what makes room, and a run that fails."""

import json
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from flowrl.run import bench_runs
from tests.run.test_bench import SMALL, jobs_of, read

pytestmark = pytest.mark.long


@pytest.fixture
def compared(command, run_file, tmp_path):
    """Call bench on the small run: two recipes, in this process; the output and what was said."""

    def call(*arguments, recipes="flow_grpo,flow_cps", to="out"):
        given = ["bench", run_file(), *SMALL, "--recipes", recipes, "--output", tmp_path / to, "--jobs", "1"]
        return SimpleNamespace(output=tmp_path / to, done=command(*given, *arguments))

    return call


def test_finished_runs_are_not_repeated_and_others_are(compared):
    """Finished is: the last update is there and evaluated, and the settings are the same."""
    first = compared("--smoke", "--seeds", "1")
    assert first.done.code == 0 and not first.done.err, first.done.err
    found = read(first.output)
    assert [(r["recipe"], r["status"]) for r in found["runs"]] == [("flow_grpo", "done"), ("flow_cps", "done")]
    for run in found["runs"]:  # both have a penalty: no row is skipped
        assert run["compute"] == run["planned"] == run["curve"][-1][0] and len(run["curve"]) == 2
        assert run["final"]["eval/total"] == run["curve"][-1][1] and run["before"]["eval/total"] == run["curve"][0][1]
    page = (first.output / "bench.md").read_text(encoding="utf-8")
    assert "| `flow_grpo` | 1 | 2 |" in page and "(bench.svg)" in page and (first.output / "bench.svg").is_file()

    logs = [first.output / key / "seed0" / "metrics.jsonl" for key in ("flow_grpo", "flow_cps")]
    before = [log.stat().st_mtime_ns for log in logs]
    assert "2 of them finished before" in compared("--smoke", "--seeds", "1").done.out
    assert [log.stat().st_mtime_ns for log in logs] == before

    whole = logs[1].read_text().splitlines(keepends=True)
    logs[1].write_text("".join(whole[:-1]))  # killed before its last update
    shutil.rmtree(logs[1].parent / "checkpoints" / "000002")
    said = compared("--smoke", "--seeds", "1").done.out
    assert "1 of them finished before" in said and "flow_cps/seed0: goes on after update 0" in said
    assert logs[0].stat().st_mtime_ns == before[0]
    numbers = [{k: v for k, v in json.loads(line).items() if "seconds" not in k and k != "elapsed"} for line in whole]
    again = [json.loads(line) for line in logs[1].read_text().splitlines()]
    assert [{k: v for k, v in line.items() if k in n} for line, n in zip(again, numbers, strict=True)] == numbers

    moved = first.output.with_name("moved")
    shutil.copytree(first.output, moved)
    job = jobs_of(first.output.parent / "run.yaml", seeds=1, smoke=True, output=moved)[0]
    assert bench_runs.finished(job)
    changed = jobs_of(
        first.output.parent / "run.yaml", "optimizer.learning_rate=1e-5", seeds=1, smoke=True, output=moved
    )
    assert not bench_runs.finished(changed[0])


def test_a_run_that_fails_is_recorded_and_the_others_go_on(compared, monkeypatch):
    train = bench_runs.train

    def failing(prepared):
        if prepared.run.recipe["name"] == "flow_grpo":
            raise RuntimeError("5 updates in a row\nwithout a finite gradient")
        return train(prepared)

    monkeypatch.setattr(bench_runs, "train", failing)
    result = compared("--smoke", "--seeds", "1")
    assert result.done.code == 1 and len(result.done.err) == 1
    assert "1 of 2 runs failed, first flow_grpo/seed0: failed: 5 updates in a row without" in result.done.err[0]
    failed, good = read(result.output)["runs"]
    assert (failed["status"], good["status"]) == ("failed", "done") and "finite gradient" in failed["error"]
    assert "RuntimeError" in (result.output / "flow_grpo" / "seed0.log").read_text(encoding="utf-8")
    assert "Failed: flow_grpo, seed 0" in (result.output / "bench.md").read_text(encoding="utf-8")
    monkeypatch.setattr(bench_runs, "train", train)
    assert compared("--smoke", "--seeds", "1").done.code == 0, "a failed run is made again"


@pytest.mark.slow
def test_two_at_once_are_processes_whose_last_words_are_kept(command, run_file, tmp_path, monkeypatch):
    """One learns, one meets a reward that fails in the middle of it."""
    (tmp_path / "moody_rewards.py").write_text(
        "calls = []\n\n\ndef moody(images):\n"
        "    calls.append(1)\n    if len(images) == 8 and len(calls) > 2:\n        raise OSError('no mood')\n"
        "    return images.mean((1, 2, 3))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "run.yaml").write_text("flow_cps: {recipe.rollout.roots: 3}\n")
    file = run_file(rewards={"moody": {"function": "moody_rewards:moody"}})
    given = ["--smoke", "--recipes", "flow_grpo,flow_cps", "--jobs", "2", "--output", tmp_path / "out"]
    done = command("bench", file, "recipe.rollout.steps=4", "recipe.rollout.noisy=window",
                   "recipe.rollout.noisy.width=2", "recipe.rollout.roots=4", *given)  # fmt: skip
    assert done.code == 1 and "reward 'moody' raised OSError: no mood" in done.err[0], done.err
    assert "bench: 2/2 runs" in done.out and "rows/s" in done.out
    assert {run["status"] for run in read(tmp_path / "out")["runs"]} == {"failed"}


def interrupted_at(monkeypatch, name, update):
    """Let Ctrl-C come during the optimizer step of an update of one recipe; what was prepared, by recipe."""
    train, seen = bench_runs.train, {}

    def armed(prepared):
        recipe, step = prepared.run.recipe["name"], prepared.learner.step
        seen[recipe] = prepared

        def stepping():
            log = step()
            if (recipe, prepared.learner.updates) == (name, update):
                os.kill(os.getpid(), signal.SIGINT)
            return log

        prepared.learner.step = stepping
        return train(prepared)

    monkeypatch.setattr(bench_runs, "train", armed)
    return seen


def numbers_of(output):
    """What a comparison found, without times."""
    kept = ("recipe", "seed", "status", "compute", "curve", "before", "final")
    return [{name: run.get(name) for name in kept} for run in read(output)["runs"]]


def test_an_interrupted_bench_goes_on_in_the_middle_of_a_run_and_ends_with_the_same_numbers(compared, monkeypatch):
    asked = ("--smoke", "--seeds", "1")
    whole = compared(*asked, to="whole")
    with monkeypatch.context() as patch:
        interrupted_at(patch, "flow_cps", 1)
        cut = compared(*asked)
    assert cut.done.code == 130 and "update 1 is checkpointed" in cut.done.err[-1], cut.done.err
    assert [run["status"] for run in read(cut.output)["runs"]] == ["done", "pending"]
    with monkeypatch.context() as patch:
        seen = interrupted_at(patch, "nobody", 0)
        rest = compared(*asked)
    assert rest.done.code == 0 and list(seen) == ["flow_cps"], rest.done.err
    assert "flow_cps/seed0: goes on after update 1" in rest.done.out and "resumed after update 1, " in rest.done.out
    assert seen["flow_cps"].origin.found.facts["update"] == 1
    assert numbers_of(cut.output) == numbers_of(whole.output)
    assert numbers_of(cut.output)[1]["compute"] > 0


def test_a_run_with_other_settings_makes_room_and_this_is_said(compared):
    asked = ("--smoke", "--seeds", "1")
    first = compared(*asked, recipes="flow_grpo")
    assert "other settings" not in first.done.out and "goes on" not in first.done.out
    again = compared(*asked, "optimizer.learning_rate=1e-5", recipes="flow_grpo")
    assert "flow_grpo/seed0: a run with other settings lay here; it is removed and made anew" in again.done.out
    (run,) = read(again.output)["runs"]
    assert (run["status"], run["learning_rate"]) == ("done", 1e-5)


def test_a_run_without_a_whole_checkpoint_is_made_anew(compared, run_file, tmp_path):
    output = compared("--smoke", "--seeds", "1", recipes="flow_grpo").output
    (job,) = jobs_of(tmp_path / "run.yaml", recipes="flow_grpo", seeds=1, smoke=True, output=output)
    assert bench_runs.begun(job) == 2
    for state in output.rglob("state.json"):
        state.unlink()
    said = []
    assert bench_runs.begun(job) is None and not bench_runs._make_room(job, said.append)
    assert not job.directory.exists() and not said, "nothing is lost that could have been gone on with"


CHILD = """
import pathlib, signal, sys, time
place = pathlib.Path(sys.argv[1])
def stop(number, frame):
    time.sleep(1)
    place.write_text("whole")
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
place.with_suffix(".ready").touch()
time.sleep(60)
"""


@pytest.fixture
def children(run_file, tmp_path, monkeypatch):
    """Two jobs, played by processes that need a second to stop well at Ctrl-C and die at once of a SIGTERM."""

    def start(job, resume):
        return subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path / job.recipe)], stderr=subprocess.DEVNULL)

    monkeypatch.setattr(bench_runs, "_start", start)
    return jobs_of(run_file(), seeds=1, smoke=True, output=tmp_path / "out"), tmp_path


@pytest.mark.parametrize("reached, kept", [(True, ["whole", "whole"]), (False, [])])
def test_after_ctrl_c_runs_may_write_their_last_update_before_they_are_ended(children, monkeypatch, reached, kept):
    """A terminal sends it to all of them; where it was sent to this process alone, they end when patience does."""
    (jobs, folder), said, children = children, [], []
    monkeypatch.setattr(bench_runs, "PATIENCE", 20.0 if reached else 0.5)
    popen = bench_runs._start
    monkeypatch.setattr(bench_runs, "_start", lambda *given: children.append(popen(*given)) or children[-1])

    def watch(running):
        if all((folder / job.recipe).with_suffix(".ready").exists() for job in jobs):
            for child in children if reached else ():
                child.send_signal(signal.SIGINT)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"interrupted\. The same command goes on\."):
        bench_runs.side_by_side(jobs, said.append, pytest.fail, watch, 2)
    codes = [child.wait(10) for child in children]
    assert codes == ([130, 130] if reached else [-signal.SIGTERM] * 2)
    assert [(folder / job.recipe).read_text() for job in jobs if (folder / job.recipe).exists()] == kept
    patience = f"{bench_runs.PATIENCE:g} s"
    assert said == [f"interrupted; flow_grpo/seed0, flow_cps/seed0 may take up to {patience} to write the last update."]


def test_a_run_of_its_own_process_goes_on_with_resume(run_file, tmp_path, monkeypatch):
    job, commands = jobs_of(run_file(), seeds=1, smoke=True, output=tmp_path / "out")[0], []
    job.directory.parent.mkdir(parents=True)

    class Recorded(subprocess.Popen):
        def __init__(self, command, **rest):
            commands.append(command)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    bench_runs._start(job, resume=False)
    bench_runs._start(job, resume=True)
    fresh, again = (command[command.index("train") + 1 :] for command in commands)
    assert fresh == [f"{job.directory}.yaml"] and again == ["--resume", str(job.directory)]
