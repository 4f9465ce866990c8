"""flowrl bench: equal compute, intervals, what is compared and what is refused."""

import json
from pathlib import Path

import pytest

from flowrl import plan
from flowrl.recipes import catalogue, find
from flowrl.run import bench, bench_results, config
from samplers import schedules

pytestmark = pytest.mark.long

SMALL = ["recipe.rollout.steps=4", "recipe.rollout.roots=4"]
ASKED = {"seeds": None, "compute": None, "output": Path("/nowhere-yet/bench"), "smoke": False}


def jobs_of(file, *changes, recipes="flow_grpo,flow_cps", **asked):
    return bench.plan_jobs(str(file), [*SMALL, *changes], recipes=recipes, **ASKED | asked)


def read(output):
    return json.loads((output / "bench.json").read_text(encoding="utf-8"))


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
    assert job.rows <= compute
    if len(set(rows)) == 1:  # else those beyond bench.COUNTED updates are taken to repeat
        assert job.rows == sum(rows[:fits]) <= compute < sum(rows)
    drawn = counts[0].leaves * (recipe.rollout.forks.number("children") if recipe.rollout.candidates else 1)
    assert (drawn, groups) == (16, 12), "as many groups and leaves as the others, or candidates at every step"
    assert job.run.evaluation.steps and job.run.evaluation.guidance, "evaluated alike, however it trains"


def test_rows_are_counted_on_the_grid_that_a_run_walks():
    """e_grpo merges by the noise of its steps: with a shift of 3 another jump, so that an update has other rows."""
    runs = [config.load("bench", ["recipe.name=e_grpo", f"model.grid={grid}"]) for grid in ("linear", "3.0")]
    even, shifted = (bench.rows_per_update(run, 1) for run in runs)
    recipe, prompts = runs[1].build_recipe(), runs[1].budget.prompts_per_update
    one = plan.count(recipe, schedules.shifted(schedules.linear(recipe.rollout.steps), shift=3.0))
    assert shifted == [prompts * (one.forwards + 2 * one.backwards)] != even


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


# All.


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
    few = () if "--recipes" in arguments else ("--recipes", "flow_grpo,flow_cps")
    line = refused("bench", run_file(), *few, *(a.replace("{tmp}", str(tmp_path)) for a in arguments))
    assert all(words in line for words in said), line


def test_a_folder_where_a_run_should_lie_is_left_alone(refused, run_file, tmp_path):
    place = tmp_path / "out" / "flow_grpo" / "seed0"
    place.mkdir(parents=True)
    (place / "thesis.txt").write_text("mine")
    (tmp_path / "out" / "bench.json").write_text("{}")
    line = refused("bench", run_file(), "--recipes", "flow_grpo", "--smoke", "--output", tmp_path / "out")
    assert "holds something else than a run" in line and (place / "thesis.txt").is_file()
