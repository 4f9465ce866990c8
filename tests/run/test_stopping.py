"""Signals: at the next network call, nothing half done, and a second one at once."""

import json
import os
import shlex
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from flowrl.run import checkpoint, resume
from flowrl.run import train as train_module
from flowrl.run.prepare import prepare
from flowrl.run.stopping import ECHO, Stopped, Stopping
from flowrl.run.train import train

pytestmark = pytest.mark.long

SMALL = {
    "budget": {"updates": 4, "prompts_per_update": 2, "micro_batch": 4},
    "optimizer": {"learning_rate": 0.02, "ema": 0.9},
    "evaluation": {"every": 2, "prompts": 3},
}


def redness(images):
    return (images[:, 0] - images[:, 1:].mean(1)).mean((1, 2)).tolist()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def handlers():
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]


@pytest.fixture
def interrupt(monkeypatch):
    """Send this process a signal from inside the n-th network call of a phase that follows so many updates."""
    evaluating, evaluate = [], train_module.evaluate

    def marked(*given, **rest):
        evaluating.append(True)
        try:
            return evaluate(*given, **rest)
        finally:
            evaluating.pop()

    monkeypatch.setattr(train_module, "evaluate", marked)

    def arm(ready, number, phase, update, nth):
        calls, velocity, where = [], ready.policy.velocity, {}

        def counted(*given):
            now = "evaluation" if evaluating else "training" if torch.is_grad_enabled() else "rollout"
            calls.append((now, ready.learner.updates))
            if "sent" not in where and calls.count((phase, update)) == nth:
                where["sent"] = len(calls)
                os.kill(os.getpid(), number)
            return velocity(*given)

        ready.policy.velocity = counted
        return calls, where

    return arm


def lines_of(folder):
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{k: x for k, x in line.items() if k not in ("seconds", "elapsed")} for line in lines]


@pytest.fixture(scope="module")
def reference():
    return {}


@pytest.mark.parametrize(
    ("phase", "update", "number", "code"),
    [
        ("rollout", 1, signal.SIGTERM, 143),
        ("training", 1, signal.SIGINT, 130),
        ("training", 2, signal.SIGTERM, 143),
        ("evaluation", 2, signal.SIGINT, 130),
    ],
)
def test_a_signal_ends_the_run_at_the_next_call_and_the_last_complete_update_is_checkpointed(
    prepared, interrupt, reference, handlers, phase, update, number, code
):
    """C69: what was begun is discarded; the run that goes on is the uninterrupted one, bit by bit."""
    if not reference:
        reference["lines"] = lines_of(train(prepared(**SMALL, output="whole")).directory)
    ready = prepared(**SMALL, output="run")
    calls, where = interrupt(ready, number, phase, update, 2)
    with pytest.raises(Stopped) as stop:
        train(ready)
    assert stop.value.code == code and len(calls) == where["sent"]
    assert str(stop.value).endswith(f"update {update} is checkpointed. Go on with: flowrl train --resume run")
    found, skipped = checkpoint.newest(Path("run/checkpoints"))
    assert found.facts["update"] == update and not skipped
    assert (found.facts["standing"]["pending"] is not None) == (phase == "evaluation")
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == handlers
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint"]
    train(prepare(resume.load(Path("run"), ()), functions={"redness": redness}, resume=True))
    assert lines_of("run") == reference["lines"]


def test_a_signal_in_the_very_first_evaluation_loses_nothing_either(prepared, interrupt):
    ready = prepared(**SMALL, output="run")
    interrupt(ready, signal.SIGTERM, "evaluation", 0, 1)
    with pytest.raises(Stopped, match="update 0 is checkpointed"):
        train(ready)
    assert not Path("run/metrics.jsonl").exists()
    result = train(prepare(resume.load(Path("run"), ()), functions={"redness": redness}, resume=True))
    assert [line["iteration"] for line in result.metrics] == [0, 1, 2, 3, 4]


def test_averaged_weights_are_swapped_back_before_the_checkpoint_of_a_stop(prepared, interrupt):
    """C63: the signal comes while the averaged weights are in force."""
    ready = prepared(**SMALL, output="run")
    interrupt(ready, signal.SIGTERM, "evaluation", 2, 1)
    with pytest.raises(Stopped):
        train(ready)
    groups = checkpoint.read(checkpoint.newest(Path("run/checkpoints"))[0].path)
    live = dict(ready.policy.trainable())
    assert all(torch.equal(x, live[name]) for name, x in groups["weights"].items())
    assert not all(torch.equal(x, groups["snapshots"][f"ema/{name}"]) for name, x in groups["weights"].items())


def test_weights_that_an_unfinished_update_has_touched_are_not_checkpointed(prepared):
    """The last one written counts; with several processes a peer may go away between the step and the end."""
    ready = prepared(**SMALL, output="run")
    step, several = ready.learner.step, ready.processes

    def touched():
        log = step()
        if ready.learner.updates == 2:
            several.count = 2
            os.kill(os.getpid(), signal.SIGTERM)
            raise RuntimeError("Connection closed by peer")
        return log

    ready.learner.step = touched
    with pytest.raises(Stopped, match="update 0 is checkpointed") as stop:
        train(ready)
    assert stop.value.code == 143
    assert checkpoint.newest(Path("run/checkpoints"))[0].facts["update"] == 0


@pytest.mark.parametrize("count", [1, 2])
def test_a_peer_that_goes_away_is_a_fault_where_no_signal_came(prepared, count):
    ready = prepared(**SMALL, output="run")

    def gone():
        ready.processes.count = count
        raise RuntimeError("Connection closed by peer")

    ready.learner.step = gone
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        train(ready)


def test_a_fault_of_a_single_process_is_told_although_a_signal_came(prepared):
    ready = prepared(**SMALL, output="run")

    def broken():
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("out of memory")

    ready.learner.step = broken
    with pytest.raises(RuntimeError, match="out of memory"):
        train(ready)


def test_a_checkpoint_that_is_asked_for_is_that_of_the_finished_update(prepared, interrupt, capsys):
    """C67: SIGUSR1 in the middle of update 3."""
    ready = prepared(**{**SMALL, "checkpoint": {"keep": 9}}, output="run")
    interrupt(ready, signal.SIGUSR1, "training", 2, 2)
    train(ready)
    assert "checkpoint of update 3, as the signal asked" in capsys.readouterr().out
    kept = {int(path.name) for path in Path("run/checkpoints").iterdir()}
    found = checkpoint.numbered(Path("run/checkpoints"), 3)
    assert 3 in kept and 1 not in kept and found.facts["learner"]["updates"] == 3
    assert found.facts["standing"]["pending"] is None


def test_a_disk_that_is_full_when_the_signal_comes_is_told_with_the_last_whole_one(prepared, interrupt, monkeypatch):
    ready = prepared(**SMALL, output="run")
    interrupt(ready, signal.SIGTERM, "rollout", 1, 1)
    save = checkpoint.save_file

    def full(values, path):
        if ".000001." in str(path):
            raise OSError(28, "No space left on device")
        save(values, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(Stopped) as stop:
        train(ready)
    assert "the checkpoint of update 1 could not be written" in str(stop.value)
    assert "interrupted; update 0 is checkpointed." in str(stop.value)


def test_a_write_that_fails_stops_the_run_with_one_line_and_the_checkpoint_before_is_whole(prepared, monkeypatch):
    """C68: found out at the end of an update, not at the end of the run."""
    ready = prepared(**{**SMALL, "checkpoint": {"every": 1}}, output="run")
    save = checkpoint.save_file

    def full(values, path):
        if ".000002." in str(path):
            raise OSError(28, "No space left on device")
        save(values, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(
        RuntimeError, match=r"^the checkpoint of update 2 could not .*left on device\); 000001 is whole"
    ):
        train(ready)
    assert checkpoint.newest(Path("run/checkpoints"))[0].facts["update"] == 1


def in_a_child(job):
    """Exit status of a forked process that does a job; 99 if it comes to the end of it."""
    child = os.fork()
    if not child:
        job()
        os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_the_process_at_once(number, code):
    def twice():
        with Stopping() as stopping:
            os.kill(os.getpid(), number)
            assert stopping.signal == number
            os.kill(os.getpid(), number)
            time.sleep(20)

    started = time.monotonic()
    assert in_a_child(twice) == code and time.monotonic() - started < 5


def test_under_a_launcher_an_echo_is_no_second_signal(monkeypatch):
    """Slurm signals the launcher and its processes; the launcher passes it on.  Later, a second one is meant."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")

    def job(wait):
        with Stopping() as stopping:
            os.kill(os.getpid(), signal.SIGTERM)
            stopping._since -= wait
            os.kill(os.getpid(), signal.SIGTERM)

    assert in_a_child(lambda: job(0)) == 99 and in_a_child(lambda: job(ECHO)) == 143


def test_one_signal_is_only_taken_note_of():
    def once():
        with Stopping():
            os.kill(os.getpid(), signal.SIGTERM)

    assert in_a_child(once) == 99


def test_a_thread_that_may_not_catch_signals_trains_all_the_same():
    seen = []

    def job():
        with Stopping() as stopping:
            seen.append(stopping.signal)

    thread = threading.Thread(target=job)
    thread.start()
    thread.join()
    assert seen == [None]


def test_the_command_to_go_on_can_be_pasted(prepared, interrupt):
    """C76: a directory with a space."""
    ready = prepared(**SMALL, output="my runs/one")
    interrupt(ready, signal.SIGTERM, "rollout", 1, 1)
    with pytest.raises(Stopped) as stop:
        train(ready)
    assert shlex.split(str(stop.value).split("Go on with: ")[1]) == ["flowrl", "train", "--resume", "my runs/one"]
