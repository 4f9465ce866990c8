"""Real processes on gloo, of which one is killed, or sleeps, or never comes: the other says so in one line and ends."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
START = """
import os, signal, sys, time
import torch
from flowrl.run import cli
from flowrl.run.processes import Processes

def job():
    process = Processes("cpu", timeout={timeout})
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


def started(rank, port, code):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": "2"}
    environment |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def together(timeout=60, odd="pass", next="process.sum_(gradients)", ranks=(0, 1)):
    """How each process ended, what it said, and seconds since all had started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code, began = START.format(timeout=timeout, odd=odd, next=next), time.monotonic()
    processes = [started(rank, port, code) for rank in ranks]
    try:
        said = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    seconds = time.monotonic() - began
    return [
        SimpleNamespace(code=p.returncode, out=out, err=err, lines=lines_of(err), seconds=seconds)
        for p, (out, err) in zip(processes, said, strict=True)
    ]


def lines_of(err):
    return [line for line in err.splitlines() if line.startswith("flowrl")]


def test_two_that_stay_end_well():
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
def test_a_killed_process_ends_the_other_at_once_in_one_line(next, what):
    one, killed = together(timeout=60, odd="os.kill(os.getpid(), signal.SIGKILL)", next=next)
    assert killed.code == -9 and one.code == 1 and one.out == "met\n"
    assert one.lines == [f"flowrl: another process ended or did not answer within 60 s, while {what}."]
    assert "Traceback" not in one.err and one.seconds < 50


def test_a_process_that_sleeps_ends_the_other_after_the_timeout_and_itself_when_it_wakes():
    one, sleeper = together(timeout=5, odd="time.sleep(10)")
    said = "another process ended or did not answer within 5 s, while gradients were summed."
    assert (one.code, one.lines) == (1, [f"flowrl: {said}"]), one.err
    assert (sleeper.code, sleeper.lines) == (1, [f"flowrl (process 1): {said}"]), sleeper.err
    assert "Traceback" not in one.err + sleeper.err and one.seconds < 45


def test_a_process_that_never_comes_is_waited_for_no_longer_than_the_timeout():
    (one,) = together(timeout=5, ranks=(0,))
    said = "flowrl: another process ended or did not answer within 5 s, while the processes looked for each other."
    assert one.code == 1 and one.lines == [said], one.err
    assert "Traceback" not in one.err and one.seconds < 40
