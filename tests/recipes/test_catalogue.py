"""The catalogue, and what holds for every method of it on the embedded base: it runs, it is on-policy, it adds up."""

import json
import math

import pytest
import torch

from flowrl.explain import explain
from flowrl.part import Part
from flowrl.recipes import PAPER, catalogue, describe, find
from flowrl.run.config import from_dict, resolve
from flowrl.run.prepare import load_policy, prepare
from flowrl.run.train import train
from flowrl.visual.policy import Example
from rewards.table import RewardTable

pytestmark = pytest.mark.long

PROMPTS = ["a red circle", "two green squares", "three blue crosses"]


def redness(images):
    """Continuous, so that no two pictures tie, and between 0 and 1."""
    return ((1 + images[:, 0] - images[:, 1:].mean(1)) / 2).mean((1, 2)).tolist()


def score(images, examples, group):
    value = torch.tensor(redness(images))[:, None]
    return RewardTable(value, torch.ones(1), group, torch.ones(len(value), dtype=torch.bool), ("redness",))


def cut(recipe):
    """Changes that leave the method as it is and make it small: six steps, two roots, two forks into two."""
    changes = {"rollout.steps": 6, "rollout.roots": min(recipe.rollout.roots, 2)}
    if isinstance(recipe.rollout.forks, Part):
        changes["rollout.forks.children"] = 2
    else:
        changes["rollout.forks"] = {t: min(n, 2) for t, n in list(recipe.rollout.forks.items())[:2]}
    changes |= {"noising.draws": min(recipe.noising.draws, 4)} if recipe.noising else {}
    changes |= {"allocate.fewer": [0]} if recipe.allocate else {}
    changes |= {"pilot.candidates": 1, "rollout.noisy.at": [0, 2]} if recipe.pilot else {}
    return changes | ({"chunks.sizes": [2, 3]} if recipe.chunks else {})


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    return path


@pytest.fixture
def run(recipe_function, file, tmp_path):
    """The small run of one method."""

    def make(train="lora", **sections):
        model = {"path": str(resolve("assets/shapes").resolve()), "grid": "linear", "max_sequence_length": 0}
        model |= {"train": train} | ({"lora": {"rank": 2, "alpha": 4}} if train == "lora" else {})
        settings = {"model": model, "data": {"train": str(file)}, "rewards": {"redness": 1.0}}
        settings |= {"recipe": {"name": recipe_function.__name__, **cut(recipe_function())}}
        settings |= {"budget": {"updates": 2, "prompts_per_update": 2}, "evaluation": {"prompts": 2}}
        return from_dict(settings | {"output": str(tmp_path / train)} | sections)

    return make


@pytest.mark.representative
def test_a_method_runs_two_updates_on_the_base(run, recipe_function):
    """C21, C23, C24: finite, on-policy within rounding although rollout and training have other batch shapes."""
    small = run(budget={"updates": 2, "prompts_per_update": 2, "batch_size": 5, "micro_batch": 7})
    lines = train(prepare(small, functions={"redness": redness})).metrics
    assert [line["iteration"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert all(math.isfinite(x) for name, x in line.items() if name not in ("on_policy", "evaluation")), line
    for line in lines[1:]:
        assert line["param_delta_norm"] > 0 and line["grad_norm"] > 0
        alone = recipe_function().rollout.drawn_by(0) == "current" and recipe_function().update.name == "once"
        assert line["on_policy"] is alone
        assert 0 <= line["ratio/deviation"] <= 1e-5 and line["reward_std/redness"] > 0
        assert line["backwards"] > 0 and line["learning_rate"] == 3e-4


@pytest.mark.representative
def test_the_ratio_is_exactly_one_at_equal_batch_shapes(run, loop, recipe_function):
    """C21: every call of rollout and training has one row, so chunks have one step."""
    recipe = recipe_function()
    ones = {"chunks.sizes": [1] * 5} if recipe.chunks else {}
    small = run(recipe={"name": recipe_function.__name__, **cut(recipe), **ones})
    policy, changed = load_policy(small, torch.device("cpu")), small.build_recipe()
    for name, rule in changed.snapshots.items():
        policy.snapshot(name, rule, 0)
    log = loop.update(
        policy, changed, loop.learner(policy, 1), batch_size=1, examples=[Example(PROMPTS[0])], score=score
    )
    assert log["ratio/deviation"] == 0.0


@pytest.mark.representative
@pytest.mark.parametrize("weights", ["lora", "full"])
def test_micro_batches_leave_the_gradient_as_it_is(run, loop, weights):
    """C14, C18: five calls at a time or all at once, ||dg|| <= 2e-6 ||g||; the adapter is moved off its zero first.

    crd subtracts errors that are nearly equal, so what batch shapes round shows two- to threefold.
    """
    small, gradients = run(weights), []
    recipe = small.build_recipe()
    for micro_batch in (5, 10_000):
        policy, generator = load_policy(small, torch.device("cpu")), torch.Generator().manual_seed(0)
        for name, rule in recipe.snapshots.items():
            policy.snapshot(name, rule, 0)
        with torch.no_grad():
            for _, parameter in policy.trainable():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        examples = [Example(p) for p in PROMPTS[:2]]
        gradient, log = loop.gradient(policy, recipe, micro_batch, examples=examples, score=score)
        gradients.append(gradient)
    assert float(gradients[0].norm()) > 0 and log["ratio/deviation"] <= 1e-5
    difference = float((gradients[0] - gradients[1]).norm() / gradients[1].norm())
    assert difference <= (6e-6 if recipe.objective.name == "crd" else 2e-6), difference


def test_a_method_fits_on_a_page(recipe_function, command_line):
    """`flowrl explain KEY`: at most 110 lines of ASCII, with every role, number and place."""
    page = command_line("explain", recipe_function.__name__)
    assert page.strip() == explain(recipe_function(), recipe_function.__doc__).strip()
    assert len(page.splitlines()) <= 110 and page.isascii() and PAPER.search(page)
    for role, filled in recipe_function().parts():
        shown = f"# {role}" if not role.startswith("penalties.") else "# penalty x"
        shown = role.removesuffix(".decay") if role.startswith("snapshots.") else shown
        assert shown in page and f"{filled.name}" in page
        assert all(f"{name}=" in page for name in filled.numbers)


def test_the_catalogue_is_told_as_json(command_line):
    rows = json.loads(command_line("recipes", "--json"))
    assert [row["key"] for row in rows] == sorted(catalogue()) and len({row["title"] for row in rows}) == len(rows)
    assert {"flow_grpo", "flow_grpo_fast", "flow_cps", "dance_grpo", "branch_grpo"} <= catalogue().keys()
    for row in rows:
        assert row["title"] and row["summary"] and row["kind"].startswith("visual.")
        assert PAPER.search(f"arXiv:{row['paper']}") or row["paper"].startswith("http")
    listed = command_line("recipes").splitlines()
    assert [line.split()[0] for line in listed] == sorted(catalogue())
    for name in ("title", "summary", "paper"):  # in columns, however long a key is
        starts = {line.index(row[name], len(row["key"])) for line, row in zip(listed, rows, strict=True)}
        assert len(starts) == 1, name


def test_a_description_is_read_off_the_function():
    row = describe("branch_grpo")
    assert (row["title"], row["paper"], row["kind"]) == ("BranchGRPO", "2509.06040", "visual.trees")
    assert row["parts"]["credit"] == "tree_depthwise" and row["parts"]["objective"] == "ppo_clip"
    assert row["asks"] == ["advantage", "log_prob", "log_prob_old"]


def test_an_unknown_method_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"recipe.name = 'branch_grop': no such recipe. Did you mean 'branch_grpo'\?"):
        find("branch_grop")


@pytest.fixture
def command_line(capsys):
    from flowrl.run.cli import main

    def call(*arguments):
        with pytest.raises(SystemExit) as stop:
            main(list(arguments))
        assert not stop.value.code
        return capsys.readouterr().out

    return call
