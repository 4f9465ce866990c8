"""Real processes on gloo, of which one is killed, or sleeps, or never comes: the other says so in one line and ends."""

import pytest

from flowrl.run.peers import PeerLost
from flowrl.run.train import train

START = """
import os, signal, sys, time
import torch
from flowrl.run import cli
from flowrl.run.processes import Processes

{before}
def job():
    process = Processes("cpu", timeout={timeout}, sharded={sharded})
    gradients = [torch.ones(3), torch.ones(1000)]
    process.sum_(gradients)
    assert gradients[0].tolist() == [2.0] * 3
    print("met", flush=True)
    if process.index == 1:
        {odd}
    {next}
    process.wait()
    process.close()

cli._running(job)
print("ended well")
"""

DEAF = """
from flowrl.run import processes as module
from flowrl.run.stopping import Stopped

class Played(module.PartialState):
    def __init__(self, **given):
        super().__init__(**given)
        self.backend = "nccl"

def deaf(collective):
    def call(*given, **more):
        try:
            collective(*given, **more)
        except RuntimeError:
            if given and isinstance(given[-1], torch.distributed.ProcessGroup):
                raise
            time.sleep(1000)
    return call

module.PartialState = Played
for name in ("all_reduce", "all_gather", "barrier"):
    setattr(torch.distributed, name, deaf(getattr(torch.distributed, name)))
"""  # NCCL is played by gloo: a peer that has gone is waited for without end, except in the side group


@pytest.fixture
def together(real_processes):
    """How each of two processes ended, where the second does something odd."""

    def run(timeout=60, odd="pass", next="process.sum_(gradients)", ranks=(0, 1), sharded=False, before=""):
        code = START.format(timeout=timeout, odd=odd, next=next, sharded=sharded, before=before)
        return real_processes(code, ranks)

    return run


def test_two_that_stay_end_well(together):
    for one in together():
        assert one.code == 0 and one.out == "met\nended well\n" and not one.lines, one.err


@pytest.mark.parametrize(
    "next, what",
    [
        ("process.sum_(gradients)", "gradients were summed"),
        ("process.gather(gradients[0])", "tables were gathered"),
        ("process.wait()", "all were waited for"),
    ],
)
def test_a_killed_process_ends_the_other_at_once_in_one_line(together, next, what):
    one, killed = together(timeout=60, odd="os.kill(os.getpid(), signal.SIGKILL)", next=next)
    assert killed.code == -9 and one.code == 1 and one.out == "met\n"
    assert one.lines == [f"flowrl: another process ended or did not answer within 60 s, while {what}."]
    assert "Traceback" not in one.err and one.seconds < 50


@pytest.mark.parametrize(
    "next, what",
    [
        ("process.sum_(gradients)", "gradients were summed"),
        ("process.wait()", "all were waited for"),
    ],
)
def test_a_replica_that_stops_alone_is_noticed_although_nccl_is_deaf(together, next, what):
    """The others would sit in a sum that no signal and no timeout of Python ends."""
    one, stopped = together(odd="raise Stopped('interrupted', 143)", next=next, before=DEAF)
    assert (one.code, one.out) == (1, "met\n"), one.err
    assert stopped.code in (143, -6), stopped.err  # torch may abort at the end of Python while its barrier waits
    assert one.lines == [f"flowrl: another process ended or did not answer within 60 s, while {what}."]
    assert "Traceback" not in one.err + stopped.err and one.seconds < 50


def test_a_shard_that_sleeps_ends_the_other_after_the_timeout_of_the_run(together):
    """Calls of the network are agreed on in a group of their own, whose default is half an hour."""
    one, sleeper = together(timeout=5, odd="time.sleep(10)", next="process.agree(1)", sharded=True)
    said = "another process ended or did not answer within 5 s, while they agreed on their calls."
    assert (one.code, one.lines) == (1, [f"flowrl: {said}"]), one.err
    assert sleeper.code == 1 and one.seconds < 45


def test_a_process_that_sleeps_ends_the_other_after_the_timeout_and_itself_when_it_wakes(together):
    one, sleeper = together(timeout=5, odd="time.sleep(10)")
    said = "another process ended or did not answer within 5 s, while gradients were summed."
    assert (one.code, one.lines) == (1, [f"flowrl: {said}"]), one.err
    assert (sleeper.code, sleeper.lines) == (1, [f"flowrl (process 1): {said}"]), sleeper.err
    assert "Traceback" not in one.err + sleeper.err and one.seconds < 45


def test_a_process_that_never_comes_is_waited_for_no_longer_than_the_timeout(together):
    (one,) = together(timeout=5, ranks=(0,))
    said = "flowrl: another process ended or did not answer within 5 s, while the processes looked for each other."
    assert one.code == 1 and one.lines == [said], one.err
    assert "Traceback" not in one.err and one.seconds < 40


def test_a_run_that_is_left_alone_says_what_is_whole_and_how_to_go_on(prepared, tmp_path):
    """The unfinished update is dropped; nothing new is asked of the device."""
    ready, sums = prepared(checkpoint={"every": 1}), []

    def lost(gradients):
        sums.append(len(gradients))
        if len(sums) == 2:
            raise PeerLost("another process ended or did not answer within 9 s, while gradients were summed.")

    ready.learner.reduce = lost
    with pytest.raises(PeerLost) as caught:
        train(ready)
    assert str(caught.value) == (
        "another process ended or did not answer within 9 s, while gradients were summed. Update 1 is checkpointed. "
        f"Go on with: flowrl train --resume {tmp_path / 'run'}"
    )
    assert (tmp_path / "run" / "checkpoints" / "000001").is_dir()
