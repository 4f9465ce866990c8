"""flowrl bench: equal compute, intervals, what is repeated and what is not, and a run that fails."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from flowrl import plan
from flowrl.recipes import catalogue, find
from flowrl.run import bench, bench_results
from samplers import schedules

SMALL = ["recipe.rollout.steps=4", "recipe.rollout.roots=4"]
ASKED = {"seeds": None, "compute": None, "output": Path("/nowhere-yet/bench"), "smoke": False}


def jobs_of(file, *changes, recipes="flow_grpo,flow_cps", **asked):
    return bench.plan_jobs(str(file), [*SMALL, *changes], recipes=recipes, **ASKED | asked)


def read(output):
    return json.loads((output / "bench.json").read_text(encoding="utf-8"))


@pytest.fixture
def compared(command, run_file, tmp_path):
    """Call bench on the small run: two recipes, in this process; the output and what was said."""

    def call(*arguments, recipes="flow_grpo,flow_cps"):
        given = ["bench", run_file(), *SMALL, "--recipes", recipes, "--output", tmp_path / "out", "--jobs", "1"]
        return SimpleNamespace(output=tmp_path / "out", done=command(*given, *arguments))

    return call


# Numbers.


def test_intervals_are_students():
    """scipy.stats.t.interval(.95, n - 1, scale=sem)."""
    assert bench_results.interval([0.7]) is None
    assert bench_results.interval([0.0, 1.0]) == pytest.approx(6.3531, abs=2e-4)
    assert bench_results.interval([1.0, 2.0, 3.0]) == pytest.approx(2.48414, abs=2e-4)
    assert bench_results.interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1.96324, abs=5e-4)


def test_a_curve_is_the_score_at_the_compute_that_was_logged():
    lines = [{"forwards": 0, "backwards": 0, "eval/total": 0.5}, {"forwards": 10, "backwards": 4}]
    lines += [{"forwards": 7, "backwards": 1, "eval/total": 0.75}]
    assert bench_results.curve(lines) == [(0, 0.5), (27, 0.75)] and bench_results.compute(lines) == 27


def test_the_table_has_the_rows_that_were_logged_not_those_that_were_planned():
    """Two seeds that were given 100,000 rows each and skipped some: 90,000 and 60,000 are 75,000."""
    scores = {"eval/total": 0.5, "eval/red": 0.5}
    one = {"recipe": "sft", "status": "done", "planned": 100_000, "updates": 9, "seconds": 1.0}
    runs = [one | {"compute": rows, "before": scores, "final": scores} for rows in (90_000, 60_000)]
    settings = {"prompts": 3, "run": "bench", "changes": ()}
    whole = {"settings": settings, "runs": runs, "versions": {}, "machine": {"cores": 2, "processor": "x"}}
    page = bench_results.page({"sft": runs}, whole)
    assert "| `sft` | 2 | 9 | 75,000 | 0.500 +- 0.000 |" in page and "at most 100,000 rows a run" in page
    assert "fewer than were planned where rows of advantage 0 are skipped" in page


@pytest.mark.parametrize("key", catalogue())
def test_a_recipe_makes_as_many_updates_as_fit(key):
    """With the numbers of the shipped files: one more update would exceed the budget."""
    compute = 30_000
    (job,) = bench.plan_jobs("bench", [], recipes=key, **ASKED | {"seeds": 1, "compute": compute})
    recipe, groups = job.run.build_recipe(), job.run.budget.prompts_per_update
    fits = job.run.budget.updates
    counts = [plan.count(recipe, schedules.linear(recipe.rollout.steps), iteration=i) for i in range(fits + 1)]
    rows = [groups * (one.forwards + 2 * one.backwards) for one in counts]
    assert job.rows == sum(rows[:fits]) <= compute < sum(rows)
    assert (recipe.rollout.leaves, groups) == (16, 12), "as many groups and leaves as the others"
    assert job.run.evaluation.steps and job.run.evaluation.guidance, "evaluated alike, however it trains"


def test_evaluations_stand_at_even_distances_and_are_six_at_most(run_file):
    for updates, every in ((1, 1), (6, 1), (7, 2), (60, 10)):
        one = find("flow_grpo")().but(rollout={"steps": 4, "roots": 4})
        cost = plan.count(one, schedules.linear(4))
        compute = updates * 2 * (cost.forwards + 2 * cost.backwards)
        (job,) = jobs_of(run_file(), recipes="flow_grpo", seeds=1, compute=compute)
        assert (job.run.budget.updates, job.run.evaluation.every) == (updates, every)


def test_what_a_recipe_changes_stands_beside_the_run_file_and_the_command_line_wins(run_file, tmp_path):
    (tmp_path / "recipes").mkdir()
    beside = tmp_path / "recipes" / "run.yaml"
    beside.write_text("flow_cps: {optimizer.learning_rate: 1.0e-5, recipe.rollout.kernel.eta: 0.5}\n")
    file = run_file(optimizer={"learning_rate": 1e-3})
    first, second = jobs_of(file, seeds=1, smoke=True)
    assert (first.run.optimizer.learning_rate, second.run.optimizer.learning_rate) == (1e-3, 1e-5)
    assert second.run.recipe["rollout.kernel.eta"] == 0.5 and second.run.recipe["rollout.steps"] == 4
    _, second = jobs_of(file, "optimizer.learning_rate=2e-4", seeds=1, smoke=True)
    assert second.run.optimizer.learning_rate == 2e-4
    beside.write_text("flow_cp: {seed: 1}\n")
    with pytest.raises(ValueError, match=r"'flow_cp' is no recipe\. Did you mean 'flow_cps'"):
        jobs_of(file, smoke=True)


def test_two_runs_at_once_unless_the_device_or_the_smoke_says_one(monkeypatch):
    """A run of seconds is made in this process: starting another takes longer."""
    monkeypatch.setattr(bench.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(bench, "pick_device", lambda wanted: "cpu")
    assert [bench.check_at_once(n, smoke=s) for n, s in ((None, False), (None, True), (5, True))] == [2, 1, 5]
    monkeypatch.setattr(bench, "pick_device", lambda wanted: "cuda")
    assert bench.check_at_once(None, smoke=False) == 1


def test_seeds_are_counted_from_that_of_the_run_file_on(run_file):
    jobs = jobs_of(run_file(), "seed=4", seeds=2, compute=100_000)
    assert [job.name for job in jobs] == [f"{key}/seed{s}" for key in ("flow_grpo", "flow_cps") for s in (4, 5)]
    assert len({str(job.directory) for job in jobs}) == 4


# Runs.


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
    logs[1].write_text("".join(whole[:-1]))  # stopped before its last update
    assert "1 of them finished before" in compared("--smoke", "--seeds", "1").done.out
    assert logs[0].stat().st_mtime_ns == before[0]
    numbers = [{k: v for k, v in json.loads(line).items() if "seconds" not in k and k != "elapsed"} for line in whole]
    again = [json.loads(line) for line in logs[1].read_text().splitlines()]
    assert [{k: v for k, v in line.items() if k in n} for line, n in zip(again, numbers, strict=True)] == numbers

    moved = first.output.with_name("moved")
    shutil.copytree(first.output, moved)
    job = jobs_of(first.output.parent / "run.yaml", seeds=1, smoke=True, output=moved)[0]
    assert bench.finished(job)
    changed = jobs_of(
        first.output.parent / "run.yaml", "optimizer.learning_rate=1e-5", seeds=1, smoke=True, output=moved
    )
    assert not bench.finished(changed[0])


def test_a_run_that_fails_is_recorded_and_the_others_go_on(compared, monkeypatch):
    train = bench.train

    def failing(prepared):
        if prepared.run.recipe["name"] == "flow_grpo":
            raise RuntimeError("5 updates in a row\nwithout a finite gradient")
        return train(prepared)

    monkeypatch.setattr(bench, "train", failing)
    result = compared("--smoke", "--seeds", "1")
    assert result.done.code == 1 and len(result.done.err) == 1
    assert "1 of 2 runs failed, first flow_grpo/seed0: failed: 5 updates in a row without" in result.done.err[0]
    failed, good = read(result.output)["runs"]
    assert (failed["status"], good["status"]) == ("failed", "done") and "finite gradient" in failed["error"]
    assert "RuntimeError" in (result.output / "flow_grpo" / "seed0.log").read_text(encoding="utf-8")
    assert "Failed: flow_grpo, seed 0" in (result.output / "bench.md").read_text(encoding="utf-8")
    monkeypatch.setattr(bench, "train", train)
    assert compared("--smoke", "--seeds", "1").done.code == 0, "a failed run is made again"


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


@pytest.mark.slow
def test_every_recipe_passes_the_smoke(command, tmp_path):
    done = command("bench", "--recipes", "all", "--smoke", "--output", tmp_path / "out")
    assert done.code == 0, done.err
    assert {run["recipe"] for run in read(tmp_path / "out")["runs"]} == set(catalogue())


# What was given, what is accepted, the nearest name; nothing is written.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--recipes", "flow_gpro"], ["'flow_gpro' is no recipe.", "Did you mean 'flow_grpo'?", "Recipes: all, "]),
        (["--compute", "100"], ["--compute = 100 is less than one update of ", "rows"]),
        (["--seeds", "0"], ["--seeds = 0: expected 1 or more"]),
        (["--jobs", "0"], ["--jobs = 0: expected 1 or more"]),
        (["--smoke", "--compute", "9"], ["--compute has no effect with --smoke"]),
        (["budget.updates=3"], ["budget.updates has no effect here", "--compute"]),
        (["recipe.name=flow_cps"], ["recipe.name has no effect here", "--recipes"]),
        (["output=x"], ["output has no effect here", "--output"]),
        (["optimizer.learning_rat=3"], ["Did you mean 'learning_rate'?"]),
        (["rewards.shapse=3"], ["reward 'shapse': no such reward."]),
        (["recipe.rollout.stepz=3"], ["recipe.rollout.stepz", "Did you mean 'steps'?"]),
        (["--output", "{tmp}"], ["holds something else than a bench"]),
        (["--output", "{tmp}/file"], ["holds something else than a bench"]),
        (["--output", "{tmp}/file/bench"], ["is a file, not a directory"]),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(refused, run_file, tmp_path, arguments, said):
    (tmp_path / "file").write_text("")
    line = refused("bench", run_file(), *(a.replace("{tmp}", str(tmp_path)) for a in arguments))
    assert all(words in line for words in said), line


def test_a_folder_where_a_run_should_lie_is_left_alone(refused, run_file, tmp_path):
    place = tmp_path / "out" / "flow_grpo" / "seed0"
    place.mkdir(parents=True)
    (place / "thesis.txt").write_text("mine")
    (tmp_path / "out" / "bench.json").write_text("{}")
    line = refused("bench", run_file(), "--recipes", "flow_grpo", "--smoke", "--output", tmp_path / "out")
    assert "holds something else than a run" in line and (place / "thesis.txt").is_file()
