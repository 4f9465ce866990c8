"""`flowrl draw`: the tree of a recipe, of a run file and of a run, with their weights and rewards."""

import shutil
from xml.etree import ElementTree

import pytest
import torch

from flowrl.run import config, draw
from flowrl.run.prepare import prepare
from flowrl.run.update import update
from flowrl.visual import trainer
from flowrl.visual.table import earned

pytestmark = pytest.mark.long

SVG = "{http://www.w3.org/2000/svg}"


def words(path):
    return [word.text for word in ElementTree.parse(path).iter(f"{SVG}text")]


def pictures(path):
    return [image.get("href") for image in ElementTree.parse(path).iter(f"{SVG}image")]


@pytest.mark.parametrize(
    ("key", "leaves", "transitions", "calls", "changes"),
    [
        ("flow_grpo", 16, 160, 160, []),
        ("branch_grpo", 16, 218, 203, []),
        ("tree_grpo_visual", 27, 228, 202, []),
        ("e_grpo", 16, 193, 178, ["recipe.rollout.forks.children=2"]),
        ("chunk_grpo", 12, 204, 193, []),
        ("diffusion_nft", 24, 240, 240, []),
    ],
)
def test_a_recipe_is_drawn_on_the_embedded_base(command, tmp_path, key, leaves, transitions, calls, changes):
    """Straight, forked, apart with merged jumps, in chunks, and without noise: every edge of every leaf's path."""
    to = tmp_path / "trees" / "one.svg"
    done = command("draw", key, *changes, "--prompt", "two blue squares", "--output", to)
    assert done.code == 0 and done.out.strip() == f"{leaves} leaves of 'two blue squares' in {to}"
    said = words(to)
    assert f"{leaves} leaves, {transitions} transitions, {calls} network calls; an update of the base model" in said
    assert said[0].endswith(f"({key})") and said[1] == '"two blue squares"'
    assert len(pictures(to)) == leaves and len(set(pictures(to))) > 1
    lines = [line for line in ElementTree.parse(to).iter(f"{SVG}path") if line.find(f"{SVG}title") is not None]
    assert len(lines) == transitions


def test_what_is_counted_of_a_tree_is_counted_on_the_models_own_grid(tmp_path):
    """e_grpo on one shifted by 3: jumps of other steps, and so other transitions than on an even grid."""
    base, own = config.resolve("assets/shapes"), tmp_path / "own"
    shutil.copytree(base, own)
    scheduler = own / "scheduler" / "scheduler_config.json"
    scheduler.write_text(scheduler.read_text().replace('"shift": 1.0', '"shift": 3.0'))
    to, changes = tmp_path / "tree.svg", ["recipe.rollout.forks.children=2", "recipe.rollout.steps=8"]
    draw.tree("e_grpo", [*changes, f"model.path={own}"], None, to)()
    said = next(word for word in words(to) if "transitions" in word)
    lines = [line for line in ElementTree.parse(to).iter(f"{SVG}path") if line.find(f"{SVG}title") is not None]
    assert f" {len(lines)} transitions" in said and said.startswith(f"{len(pictures(to))} leaves")


def test_a_tree_lies_in_the_working_directory_by_its_recipes_name(command, run_file, tmp_path, monkeypatch):
    """A run file brings its rewards: bytes of a JPEG, which are below zero and differ, and its first prompt."""
    monkeypatch.chdir(tmp_path)
    done = command("draw", run_file(rewards={"jpeg_size": 1.0, "redness": None}), "rewards.redness=null", "seed=3")
    assert done.code == 0, done.err
    said = words(tmp_path / "flow_grpo-tree.svg")
    assert '"a red circle"' in said
    scores = [float(word) for word in said if word.startswith("-0.") or word.startswith("-1.")]
    assert sum(-2 < score < -0.5 for score in scores) >= 4


def test_a_run_draws_the_tree_of_its_next_update_with_its_own_weights(command, quick, tmp_path):
    trained, base = tmp_path / "trained.svg", tmp_path / "base.svg"
    for name, to in ((quick.folder, trained), (quick.folder / "run.yaml", base)):
        done = command("draw", name, "--prompt", "two blue squares", "--output", to)
        assert done.code == 0, done.err
    assert any("update 3 of /" in word for word in words(trained))
    assert any("an update of the base model" in word for word in words(base))
    assert not set(pictures(trained)) & set(pictures(base))


def test_the_weights_of_a_tree_are_those_that_draw_at_the_checkpoint(quick, toy):
    """The current ones, or those of the snapshot that rolls out."""
    chosen, policy = draw.subject(str(quick.folder), []), toy()
    assert (chosen.iteration, chosen.key) == (2, "awm")
    weights = {name: torch.full_like(p, 2.0) for name, p in policy.trainable()}
    old = {f"old/{name}": torch.full_like(p, 3.0) for name, p in policy.trainable()}
    groups = {"weights": weights, "snapshots": old, "memory": {"seen": torch.ones(1)}}
    for drawn_by, value in (("current", 2.0), ("old", 3.0)):
        assert draw.restore(groups, policy, drawn_by) == groups["memory"]
        assert all(bool((p == value).all()) for _, p in policy.trainable())


def test_a_recipe_with_a_pilot_is_drawn_as_an_update_rolls_it_out(monkeypatch, tmp_path):
    """adagrpo: the candidates of the update are scored, the first that is chosen is drawn, and compared with them."""
    changes = ["recipe.pilot.candidates=2", "recipe.rollout.steps=6", "recipe.rollout.noisy.at=[0]"]
    changes += ["recipe.rollout.forks.children=2", "budget.prompts_per_update=2"]
    run = config.load("bench", ["recipe.name=adagrpo", *changes])
    prepared, seen = prepare(run.model_copy(update={"output": str(tmp_path / "run")})), []

    def noted(*given, tracked=None, **named):
        seen.append((tracked, earned(*given, tracked=tracked, **named).advantage))
        return earned(*given, tracked=tracked, **named)

    monkeypatch.setattr(trainer, "earned", noted)
    monkeypatch.setattr(draw, "earned", noted)
    update(prepared, 0, {}, None)
    to = tmp_path / "tree.svg"
    said = draw.tree("adagrpo", changes, None, to)()
    (theirs, whole), (ours, mine) = seen
    assert ours == theirs and ours.keys() == {"proficiency_mean", "proficiency_std"}
    torch.testing.assert_close(mine, whole[: len(mine)], msg="the first of two groups, noise and all")
    assert said.startswith("2 leaves of ") and f", the first that was chosen of 4 candidates, in {to}" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["branch_grop"],
            "'branch_grop' is no run file, no directory of a run and no recipe. Did you mean 'branch_grpo'?",
        ),
        (["quikstart"], "Did you mean 'quickstart'?"),
        (["flow_grpo", "recipe.rollout.roots=129"], "129 leaves, of which 128 at most can be told apart"),
        (["flow_grpo", "--prompt", "a dog"], "--prompt 'a dog' is none of the run's, so it has no metadata."),
        (["flow_grpo", "--output", "{there}"], "--output = '{there}' exists."),
        (["flow_grpo", "recipe.rollout.step=3"], "recipe.rollout.step: no such setting. Did you mean 'steps'?"),
        (["branch_grpo", "recipe.rollout.forks={19: 2}"], "rollout.forks: {19: 2} makes no different children"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(refused, tmp_path, arguments, said):
    there = tmp_path / "there.svg"
    there.write_text("mine")
    line = refused("draw", *(x.replace("{there}", str(there)) for x in arguments))
    assert said.replace("{there}", str(there)) in line and there.read_text() == "mine"
