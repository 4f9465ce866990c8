"""flowrl/explain.py: a whole method on one page."""

import re
from pathlib import Path

import pytest

from flowrl.explain import explain
from flowrl.objectives import clipped
from flowrl.part import part
from flowrl.recipes import PAPER
from flowrl.recipes.visual.steps import flow_grpo

ROOT = Path(__file__).resolve().parents[1]


def test_a_page_is_short_and_names_the_paper_first(recipe, recipe_function):
    page = explain(recipe, recipe_function.__doc__).splitlines()
    assert len(page) <= 110 and max(map(len, page)) <= 120
    assert page[0] == recipe_function.__doc__.strip().splitlines()[0] and PAPER.search(page[0])


def test_a_page_names_every_role_its_function_and_where_it_stands(recipe, recipe_function):
    """The line number is that of the function."""
    page = explain(recipe, recipe_function.__doc__)
    for role, filled in recipe.parts():
        if role.startswith("snapshots."):
            assert f"{role.removesuffix('.decay')} = keeps {filled.name}(" in page
            continue
        shown = role.removeprefix("penalties.") if role.startswith("penalties.") else f"# {role}: {filled.name}"
        heading = next(line for line in page.splitlines() if line.startswith("# ") and shown in line)
        path, line = re.search(r"\((\S+\.py):(\d+)\)$", heading).groups()
        assert f"def {filled.name}(" in (ROOT / path).read_text(encoding="utf-8").splitlines()[int(line) - 1]
    assert len(re.findall(r"^# ", page, flags=re.M)) == len(
        [role for role, _ in recipe.parts() if not role.startswith("snapshots.")]
    )


def test_a_page_shows_the_code_without_its_docstring(recipe, recipe_function):
    page = explain(recipe, recipe_function.__doc__)
    plain = recipe.ratio is not None and recipe.ratio.name == "per_decision"
    assert ("    return (log_prob - log_prob_old).exp()" in page) == plain and '"""' not in page


def test_a_page_shows_a_changed_number_and_the_defaults_of_the_others():
    changed = flow_grpo().but(
        objective=part(clipped.ppo_clip, clip_high=3e-4),
        rollout={"steps": 7, "guidance": 4.5},
        penalties=(),
        snapshots={},
    )
    page = explain(changed, "x")
    assert "# objective: ppo_clip(clip_low=0.2, clip_high=0.0003)" in page
    assert "rollout.steps = 7" in page and "rollout.guidance = 4.5" in page
    assert "penalty" not in page and "snapshots" not in page


def test_a_page_shows_the_coefficient_of_a_penalty_and_the_derived_leaves():
    page = explain(flow_grpo(), flow_grpo.__doc__)
    assert "# penalty x 0.04: kl_mean_over_s2" in page and "leaves = 16 per prompt (derived)" in page


def test_a_part_of_ones_own_is_shown_with_its_file(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text('def double(mask):\n    """Twice."""\n    return 2 * mask\n', encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    mine = pytest.importorskip("mine")
    page = explain(flow_grpo().but(weight=part(mine.double)), "x")
    assert f"# weight: double   ({tmp_path / 'mine.py'}:1)\n    # Twice.\n    return 2 * mask" in page
