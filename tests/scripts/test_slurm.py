"""scripts/slurm.sh under a Slurm that is played by three small scripts."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "slurm.sh"
PLAYED = {
    "srun": 'shift\nSLURM_NODEID=1 exec "$@"\n',
    "scontrol": 'if [ "$1" = show ]; then printf "node7\\nnode8\\n"; else echo "$@" >> requeued; fi\n',
    "accelerate": 'echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" > patience\necho "$@" > launched.part\n'
    "mv launched.part launched\n[ ! -f wait ] || exec sleep 60\nexit 3\n",
}


@pytest.fixture
def submit(tmp_path):
    """Start the batch script on two nodes."""
    for name, body in PLAYED.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "40012"}
    environment |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[7-8]"}

    def start(*arguments):
        command = ["bash", str(SCRIPT), *arguments]
        return subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, stderr=subprocess.PIPE)

    return start


def test_bash_can_read_it():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


def test_a_new_run_is_launched_on_all_nodes_and_its_exit_code_is_the_jobs(submit, tmp_path):
    assert submit("runs/mine", "my_run.yaml", "seed=3").wait(30) == 3
    said = (tmp_path / "launched").read_text()
    assert said.startswith("launch --machine_rank 1 --multi_gpu --num_machines 2 --num_processes 16 ")
    assert "--main_process_ip node7 --main_process_port 20012 --mixed_precision no" in said
    assert said.endswith(" scripts/train.py my_run.yaml seed=3 output=runs/mine\n")
    assert not (tmp_path / "requeued").exists()
    warning = int(SCRIPT.read_text().split("--signal=B:TERM@")[1].split()[0])
    assert 200 < int((tmp_path / "patience").read_text()) < warning == 300, "torch's own is 30; then Slurm kills"


def test_a_run_with_checkpoints_goes_on_as_it_was_described_first(submit, tmp_path):
    (tmp_path / "runs" / "mine" / "checkpoints" / "000003").mkdir(parents=True)
    assert submit("runs/mine", "my_run.yaml", "seed=3").wait(30) == 3
    assert (tmp_path / "launched").read_text().endswith(" scripts/train.py --resume runs/mine\n")


def test_the_time_limit_stops_the_run_and_puts_the_job_back_into_the_queue(submit, tmp_path):
    (tmp_path / "wait").touch()
    job, deadline = submit("runs/mine", "my_run.yaml"), time.monotonic() + 30
    while not (tmp_path / "launched").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    assert job.wait(30) == 128 + signal.SIGTERM
    assert (tmp_path / "requeued").read_text() == "requeue 40012\n"


def test_without_a_run_file_it_says_how_it_is_used(submit):
    job = submit("runs/mine")
    assert (
        job.wait(30) == 2 and job.stderr.read() == "flowrl: sbatch scripts/slurm.sh RUN_DIR RUN.yaml [KEY=VALUE]...\n"
    )
