"""Going on with a run: bit by bit where nothing changed, one line where something did."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from flowrl.run import checkpoint, resume
from flowrl.run.config import from_dict
from flowrl.run.prepare import prepare
from flowrl.run.train import train

pytestmark = pytest.mark.long

LORA = {
    "recipe": {"name": "flow_grpo", "rollout.steps": 4, "rollout.roots": 4},
    "budget": {"updates": 6, "prompts_per_update": 2},
    "optimizer": {"learning_rate": 0.01, "ema": 0.9},
    "evaluation": {"every": 3, "prompts": 3},
    "checkpoint": {"every": 3},
}
FULL = {
    "model": {"train": "full", "lora": None},
    "recipe": {"name": "flow_grpo_fast", "rollout.steps": 6, "rollout.roots": 2, "rollout.noisy.width": 1},
    "budget": {"updates": 6, "prompts_per_update": 4},  # of six: updates 2, 3, 5 and 6 begin or end inside an epoch
    "optimizer": {"learning_rate": 1e-3, "schedule": "cosine", "warmup": 1, "betas": [0.9, 0.99]},
    "evaluation": {"prompts": 3, "every": 4},
    "checkpoint": {"every": 2},
}
SMALL = {"rollout.steps": 4, "rollout.forks": {0: 3}}
REMEMBERING = [  # whose next update depends on more than weights; a share of the published group and memory
    {"name": "superflow", "rollout.steps": 4, "rollout.roots": 4, "allocate.fewer": [2, 1, 0]},
    {"name": "ddpo", "rollout.steps": 4, "track.size": 6, "track.needed": 4},
    {"name": "adagrpo", "rollout.steps": 4, "rollout.noisy.at": [0, 2], "pilot.candidates": 2},
    {"name": "sage_grpo", **SMALL, "snapshots.anchor.every": 2, "track.target": -1.0},  # the coefficient always rises
    {"name": "self_paced_grpo", **SMALL},
]
EIGHT_BITS = FULL | {"optimizer": {**FULL["optimizer"], "name": "adamw_8bit"}}


def redness(images):
    return (images[:, 0] - images[:, 1:].mean(1)).mean((1, 2)).tolist()


def share(images):
    """redness in [0, 1], as trackers that count want it."""
    return [(1 + x) / 2 for x in redness(images)]


def light(images):
    return images.mean((1, 2, 3)).tolist()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def lines_of(folder):
    """The log without times."""
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{k: x for k, x in line.items() if k not in ("seconds", "elapsed") and k[:5] != "time/"} for line in lines]


def fail_at(ready, update):
    """Let the optimiser die before the step of an update."""
    step, calls = ready.learner.step, []

    def dying():
        calls.append(1)
        if len(calls) == update:
            raise RuntimeError("the power went out")
        return step()

    ready.learner.step = dying


def again(directory, *changes, functions=None):
    run = resume.load(Path(directory), changes)
    return prepare(run, functions={"redness": redness} | (functions or {}), resume=True)


def newest_of(directory):
    found, _ = checkpoint.newest(Path(directory) / "checkpoints")
    return found.facts, checkpoint.read(found.path)


def assert_same_run(one, other):
    """Log, weights, optimiser, averages and what plain diffusers loads."""
    assert lines_of(one) == lines_of(other)
    (facts, groups), (theirs, others) = newest_of(one), newest_of(other)
    assert facts["standing"] == theirs["standing"] and facts["learner"] == theirs["learner"]
    for group in groups:
        assert groups[group].keys() == others[group].keys()
        for name, x in groups[group].items():
            theirs = torch.as_tensor(others[group][name])
            assert torch.allclose(torch.as_tensor(x), theirs, rtol=0, atol=0, equal_nan=True), (group, name)
    folder = next(name for name in ("adapter", "model") if (Path(one) / name).is_dir())
    for path in (Path(one) / folder).rglob("*.safetensors"):
        theirs = load_file(Path(other) / path.relative_to(one))
        assert all(torch.equal(x, theirs[name]) for name, x in load_file(path).items())


@pytest.fixture(scope="module")
def settings(world, base):
    """The small run of tests/run/conftest.py, for fixtures that outlive a test."""
    return {
        "model": {"path": str(base), "grid": "linear", "max_sequence_length": 0, "lora": {"rank": 4, "alpha": 16}},
        "data": {"train": str(world / "train.jsonl"), "test": str(world / "test.jsonl")},
        "rewards": {"redness": 1.0},
        "recipe": {"name": "flow_grpo", "rollout.steps": 4, "rollout.roots": 4},
        "budget": {"updates": 2, "prompts_per_update": 2},
        "evaluation": {"prompts": 3},
    }


@pytest.fixture(scope="module")
def whole(settings, tmp_path_factory):
    """The run LORA, uninterrupted."""
    given = {**settings, **LORA, "output": str(tmp_path_factory.mktemp("whole") / "run")}
    return train(prepare(from_dict(given), functions={"redness": redness})).directory


@pytest.mark.parametrize(
    "changes, dies, upto",
    [(LORA, 5, 3), (FULL, 6, 4), (EIGHT_BITS, 6, 4)],
    ids=["lora with averages", "full", "moments of 8 bits"],
)
def test_six_updates_at_once_are_some_and_the_rest_after_a_resume(prepared, request, capsys, changes, dies, upto):
    """C41, C62, C63, C65: bit by bit on one CPU: prompts, noisy steps and the schedule of the rate included."""
    one = request.getfixturevalue("whole") if changes is LORA else train(prepared(**changes, output="whole")).directory
    broken = prepared(**changes, output="parts")
    fail_at(broken, dies)
    with pytest.raises(RuntimeError, match="the power went out"):
        train(broken)
    assert len(lines_of("parts")) == dies
    ready = again("parts")
    parameters = [p for _, p in ready.policy.trainable()]
    capsys.readouterr()
    result = train(ready)
    assert [p for _, p in ready.policy.trainable()] == parameters
    assert_same_run(one, "parts")
    told = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("resumed"))
    assert told.startswith(f"resumed after update {upto}, |weights| = ") and f"optimizer at step {upto}" in told
    assert ("averaged weights restored" in told) == ("ema" in changes["optimizer"])
    assert [line["iteration"] for line in result.metrics] == list(range(7))
    elapsed = [line["elapsed"] for line in result.metrics]
    assert elapsed == sorted(elapsed)


def test_the_norm_that_is_told_is_that_of_the_trained_weights(prepared, capsys):
    """C62: not of a fresh adapter."""
    ready = prepared(**LORA | {"budget": {"updates": 3, "prompts_per_update": 2}}, output="run")
    train(ready)
    groups = newest_of("run")[1]
    norm = torch.stack([x.norm() for x in groups["weights"].values()]).norm()
    fresh = prepared(output="fresh")
    start = torch.stack([p.detach().norm() for _, p in fresh.policy.trainable()]).norm()
    capsys.readouterr()
    train(again("run", "budget.updates=4"))
    told = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("resumed"))
    said = float(told.split("|weights| = ")[1].split(",")[0])
    assert said == pytest.approx(float(norm), rel=1e-6) and abs(said - float(start)) > 1e-3


def test_a_longer_budget_goes_on_where_a_run_had_ended(prepared, whole):
    """Constant rate: three and three more are six, but for the evaluation at the end of the third."""
    short = {**LORA, "budget": {"updates": 3, "prompts_per_update": 2}}
    train(prepared(**short, output="parts"))
    train(again("parts", "budget.updates=6"))
    assert_same_run(whole, "parts")
    assert yaml.safe_load(Path("parts/run.yaml").read_text())["budget"]["updates"] == 6
    assert sorted(p.name for p in Path("parts/samples").glob("*.png")) == ["000000.png", "000003.png", "000006.png"]


def test_the_leaves_of_every_minibatch_are_those_of_the_uninterrupted_run(prepared):
    """C20: two updates per rollout, shuffled over the prompts: bit by bit."""
    recipe = {"name": "flow_grpo", "rollout.steps": 4, "rollout.roots": 4}
    recipe |= {"update": "minibatches", "update.count": 2}
    mixed = {**LORA, "recipe": recipe, "evaluation": {"every": 2, "prompts": 3}, "checkpoint": {"every": 2}}
    for output, updates in (("whole", 4), ("parts", 2)):
        train(prepared(**mixed | {"budget": {"updates": updates, "prompts_per_update": 2}}, output=output))
    train(again("parts", "budget.updates=4"))
    assert_same_run("whole", "parts")
    assert [line["optimizer_steps"] for line in lines_of("parts")[1:]] == [2] * 4
    assert all(line["ratio/distance"] > 0 for line in lines_of("parts")[1:])


@pytest.mark.parametrize("recipe", REMEMBERING, ids=lambda recipe: recipe["name"])
def test_what_a_recipe_remembers_is_gone_on_with(prepared, recipe):
    """C62: the fourth update once more, bit by bit; the third ends amid what a history and the anchor span."""
    named = {"functions": {"share": share, "light": light}}
    changes = {"recipe": recipe, "rewards": {"share": 0.6, "light": 0.4}, "evaluation": {"prompts": 1}}
    train(prepared(**named, **LORA | changes | {"budget": {"updates": 4, "prompts_per_update": 2}}, output="whole"))
    shutil.copytree("whole", "parts")
    shutil.rmtree("parts/checkpoints/000004")
    memory = newest_of("parts")[1]["memory"]
    train(again("parts", **named))
    assert_same_run("whole", "parts")
    assert bool(memory) == (recipe["name"] != "self_paced_grpo")


def test_fewer_updates_end_a_run_with_an_evaluation(prepared):
    """The log is that of a run which was to be so short from the start."""
    short = {**LORA, "budget": {"updates": 4, "prompts_per_update": 2}, "checkpoint": {"every": 1}}
    train(prepared(**short, output="whole"))
    broken = prepared(**{**LORA, "checkpoint": {"every": 1}}, output="parts")
    fail_at(broken, 5)
    with pytest.raises(RuntimeError):
        train(broken)
    assert "eval/redness" not in lines_of("parts")[-1]
    train(again("parts", "budget.updates=4"))
    assert lines_of("whole") == lines_of("parts")


def test_a_run_that_is_complete_is_left_as_it_is(whole):
    shutil.copytree(whole, "run")
    before = Path("run/metrics.jsonl").read_bytes()
    (Path("run") / "before_after.png").unlink()
    train(again("run"))
    assert Path("run/metrics.jsonl").read_bytes() == before and Path("run/before_after.png").is_file()


def test_lines_and_pictures_of_updates_that_are_done_again_go_away(prepared):
    changes = {"evaluation": {"every": 1, "prompts": 3}, "checkpoint": {"keep": 10}}
    broken = prepared(**{**LORA, **changes}, output="run")
    fail_at(broken, 5)
    with pytest.raises(RuntimeError):
        train(broken)
    for path in Path("run/checkpoints").iterdir():
        if int(path.name) > 0:
            shutil.rmtree(path)
    with Path("run/metrics.jsonl").open("a") as log:
        log.write('{"iteration": 5, "rew')  # torn
    train(again("run", "budget.updates=2", "evaluation.every=2"))
    assert [line["iteration"] for line in lines_of("run")] == [0, 1, 2]
    assert {p.name for p in Path("run/samples").glob("*.png")} == {"000000.png", "000002.png"}


@pytest.fixture(scope="module")
def stopped(settings, tmp_path_factory, world, base):
    """A run of two updates, with model and data of its own, to tamper with."""
    folder = tmp_path_factory.mktemp("stopped")
    for name in ("train.jsonl", "test.jsonl"):
        shutil.copy(world / name, folder)
    shutil.copytree(base, folder / "model")
    given = {**settings, "model": {**settings["model"], "path": str(folder / "model")}, "output": str(folder / "run")}
    given["data"] = {"train": str(folder / "train.jsonl"), "test": str(folder / "test.jsonl")}
    train(prepare(from_dict(given), functions={"redness": redness}))
    return folder


@pytest.fixture
def there(stopped, tmp_path):
    """A copy of it that a test may spoil."""
    shutil.copytree(stopped, tmp_path / "there")
    run = tmp_path / "there" / "run"
    text = (run / "run.yaml").read_text(encoding="utf-8")
    (run / "run.yaml").write_text(text.replace(str(stopped), str(tmp_path / "there")), encoding="utf-8")
    return run


def refusal(run, *changes):
    """What a resume says that refuses, on one line, with nothing written."""
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with pytest.raises(ValueError) as caught:
        again(run, *changes)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["recipe.objective.clip_low=1e-3"], 'recipe changed since the checkpoint: "objective.clip_low=null" is now'),
        (["recipe.rollout.steps=5"], '"rollout.steps=4" is now "rollout.steps=5"'),
        (["recipe.name=dance_grpo"], '"name="flow_grpo"" is now "name="dance_grpo""'),
        (["optimizer.learning_rate=1e-5"], "optimizer.learning_rate = 1e-05 was 0.0003 when the run was checkpointed"),
        (["optimizer.ema=0.9"], "optimizer.ema = 0.9 was None"),
        (["seed=1"], "seed = 1 was 0"),
        (["model.lora.rank=8"], "model.lora.rank = 8 was 4"),
        (["model.grid=pipeline"], "model.grid = 'pipeline' was 'linear'"),
        (["rewards.redness=2"], "rewards.redness.weight = 2.0 was 1.0"),
        (["rewards.jpeg_size=0.1"], "rewards.jpeg_size.weight = 0.1 was None"),
        (["data.tags=[count]"], "data.tags = ['count'] was None"),
        (["budget.prompts_per_update=3"], "budget.prompts_per_update = 3 was 2"),
        (["budget.updates=1"], "budget.updates = 1: the run has done 2 already."),
        (["output=other"], "output has no effect with --resume: the run goes on in"),
        (["budget.updats=3"], "Did you mean 'updates'?"),
    ],
)
def test_what_may_not_change_is_refused_with_both_values(there, changes, said):
    assert said in refusal(there, *changes)


def test_another_number_of_updates_is_refused_where_the_rate_follows_a_schedule(prepared):
    """The rates that led to the checkpoint were spread over the old number."""
    schedule = {"schedule": "linear"}
    train(prepared(optimizer=schedule, output="run"))
    said = refusal(Path("run"), "budget.updates=4")
    assert said.startswith("budget.updates = 4 was 2: the linear schedule is spread over them")
    assert "optimizer.schedule = constant" in said


def test_source_of_a_function_that_changed_is_a_changed_recipe_and_its_place_in_the_file_is_not(there):
    """The page of the checkpoint is compared, without line numbers."""
    facts, _ = newest_of(there)
    page = checkpoint.newest(there / "checkpoints")[0].path / "recipe.txt"
    text = page.read_text(encoding="utf-8")
    assert ".py:" in text
    moved = text.replace(".py:", ".py:9")
    assert resume.page_of(moved) == resume.page_of(text)
    line = next(line for line in text.splitlines() if "clamp(" in line).strip()
    with pytest.raises(ValueError) as caught:
        resume._check_page(text.replace(line, line.replace("clamp(", "clip(")), text)
    assert str(caught.value).startswith('recipe changed since the checkpoint: "') and line in str(caught.value)
    with pytest.raises(ValueError, match="recipe changed"):
        resume._check_page(text, text + "\n# penalty x 1: more")
    assert facts["settings"]["recipe"]["name"] == "flow_grpo"


def test_data_that_changed_is_refused_and_data_that_moved_is_not(there):
    file = there.parent / "train.jsonl"
    moved = there.parent / "moved.jsonl"
    shutil.copy(file, moved)
    again(there, f"data.train={moved}")
    file.write_text(file.read_text() + '{"prompt": "a red circle"}\n')
    said = refusal(there)
    assert said.startswith("data.train has changed since the checkpoint: sha256 ") and " is now " in said


def test_a_model_folder_that_changed_is_refused_with_the_file(there):
    """C31 and more: configurations by content, weights by size and ends."""
    scheduler = there.parent / "model" / "scheduler" / "scheduler_config.json"
    config = json.loads(scheduler.read_text())
    scheduler.write_text(json.dumps({**config, "shift": config["shift"] + 1}))
    said = refusal(there)
    assert said.startswith("model.path has changed since the checkpoint (scheduler/scheduler_config.json): sha256")


def test_another_sigma_table_is_refused(there):
    """C31: also where no file tells, as with another version of diffusers."""
    found, _ = checkpoint.newest(there / "checkpoints")
    sigmas = found.facts["sigmas"]
    resume.check_sigmas(found, list(sigmas))
    with pytest.raises(ValueError, match=r"sigma table has changed .*: sigma 1 was 0\.75 and is now 0\.8"):
        resume.check_sigmas(found, [sigmas[0], 0.8, *sigmas[2:]])
    with pytest.raises(ValueError, match=r"sigma 4 was there and is now missing|sigma 4 was 0.0"):
        resume.check_sigmas(found, sigmas[:4])


def test_a_directory_without_a_whole_checkpoint_says_what_to_do(there):
    for path in (there / "checkpoints").iterdir():
        (path / "weights.safetensors").write_bytes(b"")
    said = refusal(there)
    assert "holds no whole checkpoint (checkpoints/000002 is skipped: weights.safetensors has 0 bytes" in said
    assert f"Start anew with `flowrl train {there / 'run.yaml'} output=ANOTHER`" in said
    shutil.rmtree(there / "checkpoints")
    assert "holds no whole checkpoint: there is nothing to resume from." in refusal(there)


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--resume '.*nowhere' is not the directory of a run: it has no run\.yaml"):
        again(tmp_path / "nowhere")


def test_a_log_that_lacks_lines_is_not_made_up(there):
    lines = (there / "metrics.jsonl").read_text().splitlines(keepends=True)
    (there / "metrics.jsonl").write_text("".join(lines[:2]))
    with pytest.raises(ValueError, match="does not hold the lines of updates 0 to 2, which the checkpoint follows"):
        train(again(there))
    assert len((there / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_damaged_newest_checkpoint_is_skipped_and_the_one_before_is_taken(whole, capsys):
    """C68: and said."""
    shutil.copytree(whole, "run")
    Path("run/checkpoints/000006/optimizer.safetensors").unlink()
    train(again("run"))
    said = capsys.readouterr().out
    assert "warning: checkpoints/000006 is skipped: optimizer.safetensors is missing." in said
    assert "resumed after update 3, " in said
    assert_same_run(whole, "run")


def test_other_batch_sizes_are_accepted_with_a_warning(there, capsys):
    train(again(there, "budget.micro_batch=5", "budget.updates=3"))
    assert "warning: budget.micro_batch changed: from here on the run is not the uninterrupted one bit by bit." in (
        capsys.readouterr().out
    )


def test_other_versions_are_named_in_one_warning(there, capsys, monkeypatch):
    """The page of the recipe holds some of the code, and none of torch's."""
    facts, _ = newest_of(there)
    assert facts["versions"]["torch"] == torch.__version__ and len(facts["versions"]["flowrl"]) == 12
    assert not [line for line in again(there).warnings if "version" in line]
    now = {**facts["versions"], "flowrl": "0123456789ab", "torch": "9.9"}
    monkeypatch.setattr(resume, "versions", lambda: now)
    (line,) = [line for line in again(there).warnings if "version" in line]
    assert (
        f"torch {torch.__version__} is now 9.9" in line and f"flowrl {facts['versions']['flowrl']} is now 0123" in line
    )
    assert "diffusers" not in line and "\n" not in line
    train(again(there, "budget.updates=3"))
    assert f"warning: {line}" in capsys.readouterr().out and newest_of(there)[0]["versions"] == now


def test_a_checkpoint_that_names_no_versions_is_gone_on_from_with_a_warning():
    assert resume.other_versions({}, {"torch": "2.0"})[0].endswith(": torch unknown is now 2.0.")


def test_another_way_to_measure_forgets_the_best_so_far(there):
    """A score of other prompts or of another reward cannot be compared."""
    found, _ = checkpoint.newest(there / "checkpoints")
    assert resume.best_stands(found, resume.load(there, ["evaluation.every=1", "checkpoint.every=5"]))
    for change in ("evaluation.prompts=2", "evaluation.seed=3", "checkpoint.best=eval/redness/count"):
        assert not resume.best_stands(found, resume.load(there, [change])), change
    run = train(again(there, "evaluation.prompts=2", "budget.updates=3")).directory
    assert newest_of(run)[0]["standing"]["best_update"] == 3
