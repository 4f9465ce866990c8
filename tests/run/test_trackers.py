"""flowrl/run/trackers.py: the log in TensorBoard and wandb.  C96: neither stops a run, and by default there is none."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flowrl.run import packages, resume, trackers
from flowrl.run.config import from_dict
from flowrl.run.prepare import prepare
from flowrl.run.train import train

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)


def lines_of(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def numbers(line):
    return {name: float(x) for name, x in line.items() if isinstance(x, int | float) and name != "iteration"}


def redness(images):
    return (images[:, 0] - images[:, 1:].mean(1)).mean((1, 2)).tolist()


def broken_off_and_resumed(prepared, names):
    """Updates 1 to 3, the power goes out, and 3 and 4 after the checkpoint of update 2."""
    settings = {"budget": {"updates": 4}, "checkpoint": {"every": 2}, "evaluation": {"every": 2}}
    ready = prepared(**settings, log={"trackers": names}, output="run")
    step, calls = ready.learner.step, []

    def dying():
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("the power went out")
        return step()

    ready.learner.step = dying
    with pytest.raises(RuntimeError, match="the power went out"):
        train(ready)
    assert len(lines_of("run")) == 4
    train(prepare(resume.load(Path("run"), ()), functions={"redness": redness}, resume=True))
    assert [line["iteration"] for line in lines_of("run")] == [0, 1, 2, 3, 4]


def test_tensorboard_shows_every_number_of_the_log_once_and_the_grids(prepared):
    """Also of a resumed run: what is done again takes the place of what was there."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    broken_off_and_resumed(prepared, ["tensorboard"])
    shown = event_accumulator.EventAccumulator("run/tensorboard", {"scalars": 0, "images": 0}).Reload()
    lines = lines_of("run")
    assert set(shown.Tags()["scalars"]) == {name for line in lines for name in numbers(line)}
    for name in shown.Tags()["scalars"]:
        expected = [(line["iteration"], numbers(line)[name]) for line in lines if name in numbers(line)]
        assert [event.step for event in shown.Scalars(name)] == [update for update, _ in expected]
        assert [event.value for event in shown.Scalars(name)] == pytest.approx([x for _, x in expected], rel=1e-6)
    grids = shown.Images("samples")
    assert [(event.step, event.width, event.height) for event in grids] == [(n, 586, 96) for n in (0, 2, 4)]
    assert grids[1].encoded_image_string == Path("run/samples/000002.png").read_bytes()


class Stand:
    """A module in the place of wandb; `fails` names the call that raises, from its third time on."""

    def __init__(self, fails=None):
        self.started, self.logged, self.finished, self.calls, self.fails = [], [], 0, {}, fails
        self.__spec__ = SimpleNamespace(origin="wandb/__init__.py")

    def _called(self, name, after=2):
        self.calls[name] = self.calls.get(name, 0) + 1
        if name == self.fails and self.calls[name] > after:
            raise ConnectionError("no route\nto host")

    def init(self, **given):
        self._called("init", after=0)
        self.started.append(given)
        return self

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "update")

    def log(self, values):
        self._called("log")
        self.logged.append(values)

    def finish(self):
        self._called("finish", after=0)
        self.finished += 1

    def Image(self, path):
        return f"image of {path}"

    def Settings(self, console):
        return {"console": console}


@pytest.fixture
def wandb(monkeypatch):
    def install(fails=None):
        monkeypatch.setitem(sys.modules, "wandb", stand := Stand(fails))
        return stand

    return install


def test_wandb_is_told_the_log_and_the_grids_and_goes_on_with_the_same_run(prepared, wandb):
    stand = wandb()
    broken_off_and_resumed(prepared, ["wandb"])
    one, two = stand.started
    assert one["id"] == two["id"] and len(one["id"]) == 16 and one["resume"] == two["resume"] == "allow"
    assert (one["mode"], one["project"], one["name"], one["dir"]) == ("offline", "flowrl", "run", "run")
    assert one["config"]["budget"]["updates"] == 4 and stand.finished == 2
    told = [values for values in stand.logged if "samples" not in values]
    assert [values["update"] for values in told] == [0, 1, 2, 3, 3, 4]
    assert told[-1] == {**numbers(lines_of("run")[-1]), "update": 4}
    grids = [(values["update"], values["samples"]) for values in stand.logged if "samples" in values]
    assert grids == [(n, f"image of run/samples/{n:06d}.png") for n in (0, 2, 4)]


def test_another_run_is_another_one_and_the_environment_decides_where_it_goes(tmp_path, wandb, monkeypatch):
    stand = wandb()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        trackers.Wandb(tmp_path / name, {}, 0)
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("WANDB_PROJECT", "shapes")
    assert [(x["mode"], x["project"]) for x in stand.started] == [("offline", "flowrl"), ("online", "shapes")]
    assert stand.started[0]["id"] != stand.started[1]["id"]


@pytest.mark.parametrize("fails", ["log", "init", "finish"])
def test_a_tracker_that_cannot_connect_stops_nothing_and_is_told_once(prepared, wandb, capsys, fails):
    """C96: `log` raises ConnectionError after two calls; the run ends as it does without, and its log is complete."""
    stand = wandb(fails)
    result = train(prepared(log={"trackers": ["wandb"]}, budget={"updates": 4}, output="run"))
    assert [line["iteration"] for line in result.metrics] == [0, 1, 2, 3, 4] and lines_of("run") == result.metrics
    assert (Path("run") / "before_after.png").is_file() and (Path("run") / "checkpoints" / "000004").is_dir()
    told = [line for line in capsys.readouterr().out.splitlines() if "wandb" in line]
    said = "warning: tracker wandb failed (ConnectionError: no route to host); the run goes on, and metrics.jsonl "
    assert told == [said + "holds everything."]
    assert len(stand.logged) == {"log": 2, "init": 0, "finish": 7}[fails]
    assert stand.calls.get("log", 0) == (0 if fails == "init" else 7)  # asked again: five lines and two grids


def test_a_tracker_is_closed_where_a_run_fails(prepared, wandb):
    stand, calls = wandb(), []

    def failing(images):
        calls.append(1)
        return redness(images) if len(calls) < 3 else 1 / 0

    with pytest.raises(ValueError, match="ZeroDivisionError"):
        train(prepared(functions={"redness": failing}, log={"trackers": ["wandb"]}))
    assert stand.finished == 1 and len(stand.logged) == 3


def test_only_the_main_process_has_trackers(prepared, wandb):
    stand = wandb()
    ready = prepared(log={"trackers": ["wandb"]}, budget={"updates": 1})
    ready.processes.main = False
    train(ready)
    assert stand.started == [] and not Path("run").exists()


def test_without_a_tracker_in_the_run_file_none_is_loaded(prepared, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    result = train(prepared(budget={"updates": 1}))
    assert not {path.name for path in result.directory.iterdir()} & {"wandb", "tensorboard"}


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed_is_refused_before_the_start(refused, run_file, monkeypatch, name):
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    line = refused("train", run_file(), f"log.trackers=[{name}]")
    assert f"log.trackers: {name} is not installed. Install it (pip install 'flowrl[track]')" in line


def test_a_folder_that_is_called_like_a_package_is_not_taken_for_it(tmp_path, monkeypatch):
    """wandb leaves ./wandb behind, and the working directory is searched for modules."""
    (tmp_path / "no_such_package").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"^log\.trackers: no_such_package is not installed"):
        trackers.check(["no_such_package"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["wandbb"], "log.trackers.0 = 'wandbb': Did you mean 'wandb'? Accepted: tensorboard, wandb."),
        (["wandb", "wandb"], "log.trackers = ['wandb', 'wandb']: names a tracker twice."),
        ("wandb", "log.trackers = 'wandb': expected a list, such as [a, b]."),
    ],
)
def test_a_list_of_trackers_that_cannot_be_is_one_line(given, said):
    run = {"model": {"path": "x"}, "data": {"train": "x"}, "rewards": {"x": 1}, "recipe": "flow_grpo", "output": "x"}
    with pytest.raises(ValueError) as caught:
        from_dict(run | {"log": {"trackers": given}})
    assert str(caught.value) == said
