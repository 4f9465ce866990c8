"""scripts/train.py under a launcher: two processes are one process, to rounding."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from safetensors.torch import load_file

from flowrl import randomness
from flowrl.allocation.prompts import shuffled
from flowrl.run.config import load, resolve
from flowrl.run.prepare import prepare
from flowrl.run.train import train

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ["a red circle", "two green squares", "three blue crosses"]
REWARD = """
def redness(images, prompts):
    \"\"\"All equal for the red circle: its group teaches nothing.\"\"\"
    values = (images[:, 0] - images[:, 1:].mean(1)).mean((1, 2))
    return [0.5 if prompt == "a red circle" else float(value) for prompt, value in zip(prompts, values)]
"""
SEED = 6  # its first permutations put the red circle first, so that process 0 has nothing to train


def started(folder, *arguments):
    """Two processes on CPUs, as the quick start launches them: with --cpu, accelerate would start one."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    return subprocess.Popen(
        [*command, str(ROOT / "scripts" / "train.py"), *map(str, arguments)],
        cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def launch(folder, *arguments):
    """The whole of it."""
    process = started(folder, *arguments)
    out, err = process.communicate(timeout=300)
    return SimpleNamespace(returncode=process.returncode, stdout=out, stderr=err)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three prompts, a reward and a run of three updates with averaged weights."""
    path = tmp_path_factory.mktemp("two")
    (path / "prompts.txt").write_text("\n".join(PROMPTS))
    (path / "red_rewards.py").write_text(REWARD)
    run = {
        "model": {"path": str(resolve("assets/shapes").resolve()), "grid": "linear", "max_sequence_length": 0}
        | {"lora": {"rank": 4, "alpha": 16}, "device": "cpu"},
        "data": {"train": str(path / "prompts.txt"), "test": str(path / "prompts.txt")},
        "rewards": {"redness": {"function": "red_rewards:redness"}},
        "recipe": {"name": "flow_grpo", "rollout.steps": 4, "rollout.roots": 4, "penalties.kl_mean_over_s2": 0},
        "budget": {"updates": 3, "prompts_per_update": 3, "batch_size": 8, "micro_batch": 5},
        "optimizer": {"learning_rate": 0.002, "ema": 0.9},
        "evaluation": {"prompts": 3, "samples": 2, "every": 2},
        "checkpoint": {"every": 1},
        "seed": SEED,
        "output": "one",
    }
    (path / "run.yaml").write_text(yaml.safe_dump(run))
    return path


@pytest.fixture(scope="module")
def two(folder):
    return launch(folder, "run.yaml", "output=two")


@pytest.fixture(scope="module")
def one(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        return train(prepare(load("run.yaml")))


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_process_without_a_row_to_train_is_part_of_this(folder):
    """The premise: at some update the first process holds the red circle alone."""
    firsts = [shuffled(3, 3, i, lambda number: randomness.generator(SEED, "prompts", number))[0] for i in range(3)]
    assert 0 in firsts


def test_two_processes_finish_and_say_nothing_on_stderr(two):
    assert two.returncode == 0, two.stderr[-3000:]
    assert "Traceback" not in two.stderr and "flowrl" not in two.stderr and "Warning" not in two.stderr, two.stderr
    assert two.stdout.count("evaluation after 3 updates") == 1 and "2 process(es)" in two.stdout


def test_two_processes_log_what_one_logs(one, two, folder):
    """C18, C72: rewards, evaluation and the step on one log; three prompts are one and two."""
    together = lines_of(folder / "two")
    assert [line["iteration"] for line in together] == [0, 1, 2, 3]
    for mine, theirs in zip(one.metrics, together, strict=True):
        assert list(mine) == list(theirs)
        for name in mine.keys() - {"seconds", "elapsed", "ratio/deviation", "objective/ppo_clip"}:
            loose = name in ("param_delta_norm", "grad_norm") or name.startswith("eval/image/")  # of 8-bit pixels
            tolerance = {"rel": 5e-4} if loose else {"abs": 1e-5}
            assert theirs[name] == pytest.approx(mine[name], **tolerance), name
        assert theirs.get("ratio/deviation", 0) <= 1e-5
        assert theirs.get("objective/ppo_clip", 0) == pytest.approx(mine.get("objective/ppo_clip", 0), abs=1e-7)
    assert together[1]["rollout_calls"] == 3 * 4 * 4 and together[1]["train_calls"] == 2 * 4 * 3
    assert together[1]["forwards"] == 3 * 4 * 4 + together[1]["backwards"] == 3 * 4 * 4 + 2 * 4 * 3


def test_two_processes_leave_one_run_directory_with_the_same_weights(one, two, folder):
    names = [sorted(str(p.relative_to(folder / run)) for p in (folder / run).rglob("*")) for run in ("one", "two")]
    assert names[0] == names[1]
    files = [load_file(folder / run / "adapter" / "pytorch_lora_weights.safetensors") for run in ("one", "two")]
    assert files[0].keys() == files[1].keys()
    moved = sum(float(x.square().sum()) for name, x in files[0].items() if "lora_B" in name) ** 0.5
    apart = sum(float((x - files[1][name]).square().sum()) for name, x in files[0].items()) ** 0.5
    assert moved > 1e-3 and apart < 1e-2 * moved, (apart, moved)


def without_times(folder):
    return [{k: x for k, x in line.items() if k not in ("seconds", "elapsed")} for line in lines_of(folder)]


def test_two_processes_go_on_bit_by_bit(two, folder):
    """The first one writes; each reads."""
    shutil.copytree(folder / "two", folder / "again")
    shutil.rmtree(folder / "again" / "checkpoints" / "000003")
    done = launch(folder, "--resume", "again")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("resumed after update 2, |weights| = ") == 1 and "averaged weights" in done.stdout
    assert without_times(folder / "again") == without_times(folder / "two")
    files = [folder / run / "checkpoints" / "000003" / "weights.safetensors" for run in ("again", "two")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_signal_to_the_launcher_stops_both_with_a_checkpoint_and_one_line(folder):
    """C69: the launcher passes it on, adds a traceback and an exit code of its own, and leaves nobody behind."""
    process = started(folder, "run.yaml", "output=cut", "budget.updates=400", "checkpoint.every=300")
    log, deadline = folder / "cut" / "metrics.jsonl", time.monotonic() + 120
    while time.monotonic() < deadline and not (log.exists() and log.read_text().count("\n") >= 2):
        time.sleep(0.1)
    children = children_of(process.pid)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    lines = [line for line in said.splitlines() if line.startswith("flowrl")]
    assert len(children) == 2 and len(lines) == 1, said[-3000:]
    command = shlex.split(lines[0].partition(" is checkpointed. Go on with: ")[2])
    assert command[:5] == ["accelerate", "launch", "--multi_gpu", "--num_processes", "2"], lines
    assert Path(command[5]).samefile(ROOT / "scripts" / "train.py") and command[6:] == ["--resume", "cut"]
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    newest = max(int(path.name) for path in (folder / "cut" / "checkpoints").iterdir())
    assert newest == len(lines_of(folder / "cut")) - 1 >= 1 and f"update {newest} is checkpointed" in lines[0]


def children_of(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
