"""Small runs on the embedded base: how to describe one, how to call the command line, and runs that are made once."""

import copy
import json
import socket
import sys
import time
from itertools import islice
from types import SimpleNamespace

import forks
import pytest

from flowrl.run.config import from_dict, resolve

TRAIN = [("a red circle", "one_object"), ("two green squares", "count"), ("three blue crosses", "count")]
TRAIN += [("a yellow triangle", "one_object"), ("two red circles", "count"), ("three green triangles", "count")]
TEST = [("two blue squares", "count"), ("a green cross", "one_object"), ("three red squares", "count")]


def redness(images):
    """A reward of continuous values, different for any two pictures."""
    return (images[:, 0] - images[:, 1:].mean(1)).mean((1, 2)).tolist()


@pytest.fixture(scope="session")
def base():
    """Folder of the embedded base."""
    return resolve("assets/shapes").resolve()


@pytest.fixture(scope="session")
def world(tmp_path_factory, base):
    """A directory with prompt files of a few lines and a reward of one's own."""
    folder = tmp_path_factory.mktemp("world")
    for name, rows in (("train", TRAIN), ("test", TEST)):
        lines = [json.dumps({"prompt": prompt, "tag": tag}) for prompt, tag in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with (base / "train.jsonl").open(encoding="utf-8") as lines:
        (folder / "shapes.jsonl").write_text("".join(islice(lines, 6)), encoding="utf-8")
    (folder / "my_rewards.py").write_text(
        "def redness(images):\n    return (images[:, 0] - images[:, 1:].mean(1)).mean((1, 2)).tolist()\n"
    )
    return folder


@pytest.fixture
def given(world, base, tmp_path):
    """A run of seconds as a mapping: four rollouts of four steps for each of two prompts, two updates."""
    return {
        "model": {"path": str(base), "grid": "linear", "max_sequence_length": 0, "lora": {"rank": 4, "alpha": 16}},
        "data": {"train": str(world / "train.jsonl"), "test": str(world / "test.jsonl")},
        "rewards": {"redness": 1.0},
        "recipe": {"name": "flow_grpo", "rollout.steps": 4, "rollout.roots": 4},
        "budget": {"updates": 2, "prompts_per_update": 2},
        "evaluation": {"prompts": 3},
        "output": str(tmp_path / "run"),
    }


def merged(settings, changes):
    """The nested mapping with those of `changes` on top; a recipe is replaced as a whole."""
    out = copy.deepcopy(settings)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(out.get(key), dict) and key not in ("recipe", "rewards")
        out[key] = merged(out[key], value) if nested else copy.deepcopy(value)
    return out


@pytest.fixture
def prepared(given):
    """Prepare the small run with changes; rewards are plain functions here."""
    from flowrl.run.prepare import prepare

    def make(functions=None, pipe=None, **changes):
        functions = {"redness": redness} | (functions or {})
        return prepare(from_dict(merged(given, changes)), pipe=pipe, functions=functions)

    return make


@pytest.fixture
def command(capsys, monkeypatch):
    """Call the command line in this process: exit code, stdout and the lines of stderr."""
    from flowrl.run.cli import main

    def call(*arguments):
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as stop:
            main([str(a) for a in arguments])
        said = capsys.readouterr()
        return SimpleNamespace(code=stop.value.code or 0, out=said.out, err=said.err.splitlines())

    return call


@pytest.fixture
def refused(command, tmp_path, monkeypatch):
    """Call the command line where it must refuse: exit code 2, one line on stderr, nothing written; the line."""

    def call(*arguments):
        empty = tmp_path / "nothing-here"
        empty.mkdir(exist_ok=True)
        monkeypatch.chdir(empty)
        before = sorted(tmp_path.rglob("*"))
        done = command(*arguments)
        assert done.code == 2 and len(done.err) == 1 and done.err[0].startswith("flowrl: "), done.err
        assert sorted(tmp_path.rglob("*")) == before and not done.out
        return done.err[0]

    return call


@pytest.fixture
def run_file(given, world, tmp_path):
    """Write the small run, with changes, as YAML and return the path."""
    import yaml

    def write(**changes):
        settings = merged(given, {"rewards": {"jpeg_size": 1.0}} | changes)
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        return path

    return write


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="session")
def quick(tmp_path_factory):
    """The quick start cut to two updates, from the command line, with averaged weights off: full weights."""
    from flowrl.run.cli import main

    folder = tmp_path_factory.mktemp("quick") / "run"
    cut = ["budget.updates=2", "budget.prompts_per_update=3", "seed=5", f"output={folder}"]
    cut += ["recipe.rollout.roots=6", "evaluation.prompts=12", "evaluation.others=6", "profile=true"]
    with pytest.raises(SystemExit) as stop:
        main(["train", "scripts/configs/quickstart.yaml", *cut])
    assert not stop.value.code
    return SimpleNamespace(folder=folder, metrics=lines_of(folder))


@pytest.fixture(scope="session")
def real_processes():
    """Run a piece of code as some ranks of two processes, or as one alone: how each ended and what it said."""

    def start(rank, count, port, code, more):
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
        environment = {"MASTER_ADDR": "127.0.0.1", **more}
        return forks.start(code, **environment, **({n: str(x) for n, x in places.items()} if count > 1 else {}))

    def run(code, ranks=(0, 1), count=2, **environment):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        began, processes = time.monotonic(), [start(rank, count, port, code, environment) for rank in ranks]
        try:
            done = [forks.end(process, timeout=100) for process in processes]
        finally:
            for process in processes:
                process.kill()
        for each in done:
            each.seconds = time.monotonic() - began
            each.lines = [line for line in each.err.splitlines() if line.startswith("flowrl")]
        return done

    return run
