"""What the README says is what the code does."""

import re
from pathlib import Path

import pytest

from flowrl import plan
from flowrl.recipes import catalogue, describe, find
from flowrl.run.config import load
from samplers import schedules

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def counts(recipe):
    return plan.count(recipe, schedules.linear(recipe.rollout.steps))


@pytest.mark.parametrize("key", catalogue())
def test_the_table_of_methods_is_the_catalogue(key):
    row = describe(key)
    address = row["paper"] if row["paper"].startswith("http") else f"https://arxiv.org/abs/{row['paper']}"
    paper = f"[{row['paper'].removeprefix('https://')}]({address})"
    assert f"| `{key}` | {row['title']} | {paper} | {row['summary']} |" in README


def test_the_walk_of_one_prompt_has_the_numbers_of_its_plan():
    window = ["recipe.rollout.noisy=window", "recipe.rollout.noisy.width=4"]
    run = load("bench", ["recipe.name=flow_grpo", *window, "recipe.penalties.kl_mean_over_s2=0"])
    one, groups = counts(run.build_recipe()), run.budget.prompts_per_update
    assert (one.leaves, groups) == (16, 12)
    assert f"{one.edges}\n   transitions, {one.states_stored} of the {one.states} states kept" in README
    assert f"{one.rollout_calls} rows through the network" in README
    assert f"each of the {groups * one.train_edges} decisions of the update" in README
    assert f"standard deviation of all {groups * one.leaves}" in README
    assert '"a red cross left of a blue circle"' in (ROOT / "assets/shapes/train.jsonl").read_text(encoding="utf-8")


def test_what_the_quick_start_does_instead_has_the_numbers_of_its_plan():
    run = load("quickstart")
    one, groups = counts(run.build_recipe()), run.budget.prompts_per_update
    assert (run.build_recipe().objective.name, groups) == ("ppo_clip", 12)
    assert f"keeps the {one.states_stored} finals of {one.states} states" in README
    assert f"{groups * one.train_calls:,}\nrows of an update" in README


def test_the_numbers_of_branch_grpo_are_those_of_its_plan():
    one = counts(find("branch_grpo")())
    assert (one.edges, one.states, one.rollout_calls, one.train_edges, one.train_calls) == (218, 219, 203, 202, 187)
    said = f"{one.edges} transitions between {one.states} states, but only {one.rollout_calls} rows"
    assert said in README and f"{one.train_edges} transitions take {one.train_calls} rows" in README


def test_every_file_that_the_readme_names_exists():
    names = set(re.findall(r"`((?:scripts|assets|samplers|rewards|flowrl|tests)/[\w./]+)`", README))
    assert len(names) >= 4 and all((ROOT / name).exists() for name in names), names


def test_the_tree_of_the_readme_names_every_module():
    tree = README.split("## The tree")[1]
    modules = [
        p for name in ("samplers", "rewards", "flowrl") for p in (ROOT / name).rglob("*.py") if p.stem != "__init__"
    ]
    missing = [p.name for p in modules if p.name not in tree and p.stem not in tree]
    assert not missing, missing
