"""A run that is killed again and again ends as the one that was left alone, bit by bit.

SIGKILL falls at a random event of a random phase: a network call of rollout, training or evaluation, or a write of a
checkpoint.  FLOWRL_KILLS=N sets the number of the slow test.
"""

import json
import os
import random
import signal
from pathlib import Path

import forks
import pytest
import torch
from safetensors.torch import load_file

from flowrl.run import checkpoint, resume
from flowrl.run import train as train_module
from flowrl.run.config import from_dict
from flowrl.run.prepare import prepare
from flowrl.run.train import train

pytestmark = pytest.mark.long

PHASES = {"rollout": 4, "training": 5, "evaluation": 3, "checkpoint": 16}  # events of an update, about
RECIPES = {
    "flow_grpo": {"rollout.steps": 4, "rollout.roots": 3},
    "branch_grpo": {"rollout.steps": 5, "rollout.forks": {0: 2, 2: 2}},
    "diffusion_nft": {"rollout.steps": 4, "rollout.roots": 3, "noising.draws": 2},
}
FULL = ("diffusion_nft",)  # full weights: its old policy and its reference are copies
WEIGHTS = ("adapter/pytorch_lora_weights.safetensors", "model/transformer/*.safetensors")
ROOT = Path(__file__).resolve().parents[2]
KILLS = int(os.environ.get("FLOWRL_KILLS", "20"))


def redness(images):
    return (images[:, 0] - images[:, 1:].mean(1)).mean((1, 2)).tolist()


@pytest.fixture
def settings(given):
    """The small run with averaged weights, an evaluation every second update and a checkpoint after each."""
    return given | {
        "optimizer": {"learning_rate": 0.02, "ema": 0.9},
        "budget": {"prompts_per_update": 2, "micro_batch": 4},
        "evaluation": {"every": 2, "prompts": 3},
        "checkpoint": {"every": 1},
    }


def run_on(settings, directory, doom=lambda ready: None):
    """Start the run, or go on with it, in this process."""
    if checkpoint.newest(directory / "checkpoints")[0]:
        ready = prepare(resume.load(directory, ()), functions={"redness": redness}, resume=True)
    else:
        ready = prepare(from_dict(settings | {"output": str(directory)}), functions={"redness": redness})
    doom(ready)
    train(ready)


def killer(phase, nth):
    """Let a prepared run die at the n-th event of a phase."""

    def doom(ready):
        seen, evaluating = [], []

        def event(kind):
            seen.append(kind)
            if seen.count(phase) == nth and kind == phase:
                os.kill(os.getpid(), signal.SIGKILL)

        velocity, evaluate, sync = ready.policy.velocity, train_module.evaluate, checkpoint.sync

        def called(*given):
            event("evaluation" if evaluating else "training" if torch.is_grad_enabled() else "rollout")
            return velocity(*given)

        def evaluated(*given, **rest):
            evaluating.append(True)
            found = evaluate(*given, **rest)
            evaluating.pop()
            return found

        ready.policy.velocity, train_module.evaluate = called, evaluated
        checkpoint.sync = lambda path: (event("checkpoint"), sync(path))

    return doom


def in_a_child(settings, directory, *doom):
    """The exit status of `run_on` in a process of its own, negative for a signal; doom: the phase and the event."""
    doomed = f", killer(*{doom!r})" if doom else ""
    code = f"from tests.run.test_kill import *\nrun_on({settings!r}, Path({str(directory)!r}){doomed})"
    return forks.end(forks.start(code), timeout=100).code


def kill_and_compare(settings, recipe, folder, kills, updates, seed=0):
    """The numbers of the phases in which the run died; everything is as without that."""
    settings["recipe"], settings["budget"]["updates"] = {"name": recipe, **RECIPES[recipe]}, updates
    if recipe in FULL:
        settings["model"] = {k: v for k, v in settings["model"].items() if k != "lora"} | {"train": "full"}
        settings["optimizer"] = settings["optimizer"] | {"learning_rate": 1e-3}
    chance, died = random.Random(seed), []
    assert in_a_child(settings, folder / "whole") == 0
    while len(died) < kills:
        phase = list(PHASES)[len(died) % len(PHASES)]
        nth = chance.randint(1, PHASES[phase])
        code = in_a_child(settings, folder / "killed", phase, nth)
        assert code in (0, -signal.SIGKILL), (phase, nth, code)
        if code == 0:
            break
        died.append((phase, nth))
        if not checkpoint.newest(folder / "killed" / "checkpoints")[0]:  # before the first one there is nothing
            (folder / "killed").rename(folder / f"stillborn-{len(died)}")
    assert in_a_child(settings, folder / "killed") == 0
    assert_same(folder / "whole", folder / "killed")
    return died


def lines_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{k: x for k, x in line.items() if k not in ("seconds", "elapsed")} for line in lines]


def assert_same(one, other):
    assert lines_of(one) == lines_of(other)
    (found, _), (theirs, skipped) = (checkpoint.newest(folder / "checkpoints") for folder in (one, other))
    assert found.facts["standing"] == theirs.facts["standing"] and not skipped
    groups, others = checkpoint.read(found.path), checkpoint.read(theirs.path)
    for group, values in groups.items():
        assert values.keys() == others[group].keys() and all(
            torch.equal(x, others[group][n]) for n, x in values.items()
        )
    (weights,) = [p.relative_to(one) for name in WEIGHTS for p in one.glob(name)]
    left, right = load_file(one / weights), load_file(other / weights)
    assert left.keys() == right.keys() and all(torch.equal(x, right[name]) for name, x in left.items())
    files = [sorted(str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()) for f in (one, other)]
    assert files[0] == files[1]


@pytest.mark.slow
def test_three_kills_change_nothing(settings, tmp_path):
    """In rollout, training and evaluation."""
    died = kill_and_compare(settings, "flow_grpo", tmp_path, kills=3, updates=4)
    assert len(died) == 3


def test_a_kill_in_the_middle_of_a_checkpoint_changes_nothing(settings, tmp_path):
    settings["recipe"], settings["budget"]["updates"] = {"name": "flow_grpo", **RECIPES["flow_grpo"]}, 2
    assert in_a_child(settings, tmp_path / "whole") == 0
    assert in_a_child(settings, tmp_path / "killed", "checkpoint", 11) == -signal.SIGKILL
    found, skipped = checkpoint.newest(tmp_path / "killed" / "checkpoints")
    assert found.facts["update"] == 0 and "interrupted" in skipped[0]
    assert in_a_child(settings, tmp_path / "killed") == 0
    assert_same(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_many_kills_change_nothing(settings, tmp_path, recipe):
    died = kill_and_compare(settings, recipe, tmp_path, kills=KILLS, updates=KILLS)
    assert len(died) == KILLS and {phase for phase, _ in died} == set(PHASES)
