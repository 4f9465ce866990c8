"""docs/methods.md: it is what the recipes say, and what it says is so."""

import re
from pathlib import Path

import pytest

from flowrl import methods
from flowrl.recipes import catalogue, describe, find
from flowrl.recipes.visual.steps import flow_grpo

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def page():
    return methods.markdown()


def section(page, key):
    return page.split(f"\n### {key}\n")[1].split("\n##")[0]


def test_the_file_is_what_the_recipes_say(page):
    assert (ROOT / "docs/methods.md").read_text(encoding="utf-8") == page, f"run {methods.COMMAND}"


def test_a_parent_is_read_off_the_source():
    parents = {key: methods.parent(key) for key in catalogue()}
    assert [key for key, above in parents.items() if above is None] == ["flow_grpo"]
    assert set(parents.values()) - {None} <= set(catalogue())
    known = {"dance_grpo": "flow_grpo", "branch_grpo": "dance_grpo", "branch_grpo_mix": "branch_grpo", "loop": "ddpo"}
    known |= {"flow_grpo_fast_branch": "flow_grpo_fast", "sft": "rwr", "crd": "dgpo", "chunk_grpo": "dance_grpo"}
    assert parents | known == parents


def test_a_difference_names_roles_and_numbers_and_nothing_else():
    assert methods.difference(find("dance_grpo")(), find("branch_grpo")()) == [
        ("rollout.steps", "16", "20"),
        ("rollout.forks", "{0: 12}", "{0: 2, 3: 2, 6: 2, 9: 2}"),
        ("rollout.noise", "independent", "correlated(strength=4.0)"),
        ("advantage", "grpo(scope='group', ddof=1, eps=1e-08, clamp=5.0, scale=1.0)", "raw"),
        ("credit", "broadcast", "tree_depthwise(ddof=1, eps=1e-08, min_spread=1e-06, clamp=5.0)"),
        ("select", "random_steps(fraction=0.6)", "drawn"),
        ("weight", "token_mean", "edge_mean"),
        ("objective.clip_low", "0.0001", "0.001"),
        ("objective.clip_high", "0.0001", "0.001"),
    ]
    assert methods.difference(flow_grpo(), flow_grpo()) == []


def test_a_difference_names_penalties_and_snapshots():
    found = {name: pair for name, *pair in methods.difference(find("diffusion_nft")(), find("awm")())}
    assert found["penalties.velocity_mse"] == ["0.0001", "0.001"]
    assert found["penalties.velocity_mse_anchor"] == ["none", "1.0"]
    keeps = "keeps linear(slope=0.001, most={}, start=0.0, after=0), every 1"
    assert (found["snapshots.old"], found["snapshots.anchor"]) == (
        [keeps.format(0.5), "none"],
        ["none", keeps.format(0.3)],
    )
    assert found["noising.elbo"] == ["none", "weighted(power=0.0)"] and "snapshots.ref" not in found


def test_every_method_has_its_words_its_counts_and_all_its_parts(page, recipe_function):
    key, row = recipe_function.__name__, describe(recipe_function.__name__)
    said = section(page, key)
    assert f"**{row['title']}**, [{row['paper']}]" in said and row["summary"] in said
    for line in recipe_function.__doc__.split("\n\n")[1:]:
        assert " ".join(line.split()) in " ".join(said.split())
    assert re.search(
        r"^\d+ leaves, \d+ transitions, \d+ network calls to draw them and \d+ to train;", said, flags=re.M
    )
    for role, filled in recipe_function().parts():
        numbers = ", ".join(f"{name}={filled.number(name)!r}" for name in filled.takes)
        assert re.search(rf"^\| {role} \| \[`{filled.name}`\]\(\S+\) \| .* \| {re.escape(numbers)} \|$", said, re.M), (
            role
        )
    if above := methods.parent(key):
        rows = methods.difference(find(above)(), recipe_function())
        assert rows and all(f"| {' | '.join(row)} |" in said for row in rows)
        assert f"Difference from [`{above}`](#{above}):" in said


def test_the_counts_of_branch_grpo_are_the_closed_form(page):
    """390 forwards: 203 to draw and 187 to train."""
    counts = (
        "16 leaves, 218 transitions, 203 network calls to draw them and 187 to train; 390 forwards and 187 backwards"
    )
    assert counts in section(page, "branch_grpo")


def test_kinds_come_in_their_order_and_every_link_leads_somewhere(page):
    kinds = re.findall(r"^## (\S+)$", page, flags=re.M)
    assert kinds[:5] == list(methods.KINDS)
    headings = re.findall(r"^### (\S+)$", page, flags=re.M)
    assert sorted(headings) == sorted(catalogue()) and headings[0] == "flow_grpo"
    anchors, files = set(re.findall(r"\(#(\S+?)\)", page)), set(re.findall(r"\(\.\./(\S+?)\)", page))
    assert anchors == set(headings)
    assert len(files) > 10 and all((ROOT / name).is_file() for name in files)


def test_a_table_is_not_broken_by_a_bar_inside_a_cell(page):
    head, _, row = methods._table(("a", "b"), [("|x|", "y")])
    assert (head, row) == ("| a | b |", r"| \|x\| | y |")
    bars = 0
    for line in page.splitlines():
        found = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert not (bars and found) or bars == found, line
        bars = found


def test_two_forms_at_once_are_refused(capsys):
    from flowrl.run.cli import main

    with pytest.raises(SystemExit) as stop:
        main(["recipes", "--json", "--markdown"])
    assert stop.value.code == 2 and "--json has no effect with --markdown" in capsys.readouterr().err
