"""A policy without learning: counted, evaluated, drawn."""

import json

import pytest
from PIL import Image

from flowrl.run import use
from flowrl.run.config import resolve


def test_a_plan_has_the_names_that_scripts_rely_on(command):
    """The closed form of branch_grpo on the quick start's base: 20 steps, forks at 0, 3, 6, 9."""
    done = command(
        "plan", "scripts/configs/quickstart.yaml", "recipe={name: branch_grpo}", "budget.updates=5",
        "budget.prompts_per_update=3", "--json",
    )  # fmt: skip
    assert done.code == 0 and not done.err
    table = json.loads(done.out)
    expected = {"leaves": 16, "states": 219, "edges": 218, "rollout_calls": 203, "train_edges": 202, "train_calls": 187}
    for name, per_prompt in expected.items():
        assert table[name] == {"per_prompt": per_prompt, "per_update": 3 * per_prompt, "total": 15 * per_prompt}
    assert table["optimizer_steps"]["per_update"] == 1 and table["optimizer_steps"]["total"] == 5
    assert 3_300_000 < table["trainable_parameters"]["total"] < 3_700_000


@pytest.mark.parametrize("key", ["flow_grpo", "flow_grpo_fast", "flow_cps", "dance_grpo", "branch_grpo"])
def test_the_quick_start_takes_any_method(command, key):
    done = command("plan", "scripts/configs/quickstart.yaml", f"recipe.name={key}", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["leaves"]["per_prompt"] >= 2


def test_a_plan_reads_no_weights(command, tmp_path, run_file, base):
    for name in ("model_index.json", "transformer/config.json"):
        (tmp_path / "bare" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "bare" / name).write_text((base / name).read_text())
    table = use.plan(str(run_file(model={"path": str(tmp_path / "bare")})), ())
    modules = 6 * 7 + 5  # of the last block no to_add_out
    assert table["trainable_parameters"]["total"] == modules * 4 * (128 + 128)


def test_a_plan_is_printed_as_a_table(command, run_file):
    done = command("plan", run_file(), "budget.updates=1000")
    assert done.code == 0 and "1,000" in done.out and done.out.split()[:2] == ["per", "prompt"]


def test_the_base_is_evaluated_as_a_run_does_before_its_first_update(command, quick):
    done = command("eval", quick.folder / "run.yaml", "--json")
    assert done.code == 0, done.err
    first = {name: x for name, x in quick.metrics[0].items() if name.startswith("eval/")}
    assert json.loads(done.out) == pytest.approx(first, abs=1e-6)


def test_trained_weights_are_evaluated_as_the_run_did_after_its_last_update(command, quick):
    done = command("eval", quick.folder / "run.yaml", "--weights", quick.folder / "model", "--json")
    assert done.code == 0, done.err
    last = {name: x for name, x in quick.metrics[-1].items() if name.startswith("eval/")}
    assert json.loads(done.out) == pytest.approx(last, abs=1e-6)


def test_pictures_of_prompts_are_drawn_a_row_for_each(command, quick, tmp_path):
    to = tmp_path / "three.png"
    arguments = ["--prompt", "a red circle", "--prompt", "two blue squares", "--to", to, "evaluation.samples=3"]
    done = command("sample", quick.folder / "run.yaml", *arguments)
    assert done.code == 0 and done.out.strip() == f"6 pictures of 2 prompts in {to}"
    assert Image.open(to).size == (3 * 98 - 2, 2 * 98 - 2)


def test_a_picture_is_never_overwritten(refused, run_file, tmp_path):
    (tmp_path / "there.png").write_bytes(b"mine")
    there = tmp_path / "there.png"
    assert f"--to = '{there}' exists" in refused("sample", run_file(), "--to", there)
    assert (tmp_path / "there.png").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("weights", "said"),
    [("nowhere", "holds no adapter"), ("model", "holds no adapter"), ("adapter-of-rank-2", "another rank")],
)
def test_weights_that_do_not_fit_are_refused(refused, run_file, quick, tmp_path, weights, said):
    path = quick.folder / "model" if weights == "model" else tmp_path / weights
    if weights.startswith("adapter"):
        from flowrl.run.config import load
        from flowrl.run.prepare import load_policy, pick_device
        from flowrl.run.processes import Processes

        small = load(run_file(), ["model.lora.rank=2"])
        load_policy(small, Processes(pick_device("cpu")).device).save(path)
    assert said in (line := refused("eval", run_file(), "--weights", path)) and str(path) in line


def test_a_folder_of_adapters_is_no_model(refused, quick, tmp_path):
    line = refused("eval", quick.folder / "run.yaml", "--weights", tmp_path)
    assert "weights = " in line and "is not a pipeline" in line and resolve("assets/shapes").exists()
