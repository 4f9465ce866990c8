"""A policy without learning: counted, evaluated, drawn."""

import json
import shutil

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from PIL import Image

from flowrl.run import directory, use
from flowrl.run.config import resolve

pytestmark = pytest.mark.long


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


def test_the_optimizer_steps_of_several_updates_are_said_before_a_run_starts(command, run_file, prepared):
    """C17: ten pictures of two prompts on four steps, in three shares."""
    recipe = {"name": "flow_grpo", "rollout.steps": 4, "rollout.roots": 5, "update": "minibatches", "update.count": 3}
    table = json.loads(command("plan", run_file(recipe=recipe), "--json").out)
    assert table["optimizer_steps"] == {"per_prompt": 3, "per_update": 3, "total": 6}
    assert (table["train_calls"]["per_prompt"], table["train_calls"]["per_update"]) == (15, 30)
    *_, line = directory.overview(prepared(recipe=recipe))
    assert line == (
        "an update: 2 prompts x 5 leaves = 10 pictures, 10 scored, 40 network rows to draw them, 30 to train "
        "30 decisions, 3 optimizer step(s); 1 process(es)"
    )


@pytest.mark.parametrize("key", ["flow_grpo", "flow_grpo_fast", "flow_cps", "dance_grpo", "branch_grpo"])
def test_the_quick_start_takes_any_method(command, key):
    done = command("plan", "scripts/configs/quickstart.yaml", f"recipe.name={key}", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["leaves"]["per_prompt"] >= 2


def test_a_plan_reads_no_weights(command, tmp_path, run_file, base):
    for file in (path for path in base.rglob("*.json") if "tokenizer" not in path.parent.name):
        (tmp_path / "bare" / file.relative_to(base)).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "bare" / file.relative_to(base)).write_text(file.read_text())
    table = use.plan(str(run_file(model={"path": str(tmp_path / "bare")})), ()).table
    modules = 6 * 7 + 5  # of the last block no to_add_out
    assert table["trainable_parameters"]["total"] == modules * 4 * (128 + 128)


def test_a_plan_is_printed_as_a_table(command, run_file):
    done = command("plan", run_file(), "budget.updates=1000")
    assert done.code == 0 and "1,000" in done.out and done.out.split()[:2] == ["per", "prompt"]


def test_the_base_is_evaluated_as_a_run_does_before_its_first_update(command, quick):
    done = command("eval", quick.folder / "run.yaml", "--json")
    assert done.code == 0, done.err
    first = {name: x for name, x in quick.metrics[0].items() if name.startswith("eval/")}
    log = json.loads(done.out)
    assert log.pop("evaluation") == quick.metrics[0]["evaluation"] | {"weights": "base"}
    assert log == pytest.approx(first, abs=1e-6)


def test_an_evaluation_says_how_its_pictures_were_made(command, run_file):
    """C98: the six settings, above the numbers."""
    done = command("eval", run_file(), "evaluation.steps=2", "evaluation.seed=7", "evaluation.guidance=1.5")
    assert done.code == 0, done.err
    assert done.out.splitlines()[0] == "steps 2, size 32x32, guidance 1.5, kernel ode, weights base, seed 7"


def test_trained_weights_are_evaluated_as_the_run_did_after_its_last_update(command, quick):
    done = command("eval", quick.folder / "run.yaml", "--weights", quick.folder / "model", "--json")
    assert done.code == 0, done.err
    last = {name: x for name, x in quick.metrics[-1].items() if name.startswith("eval/")}
    log = json.loads(done.out)
    assert log.pop("evaluation") == quick.metrics[-1]["evaluation"] | {"weights": str(quick.folder / "model")}
    assert log == pytest.approx(last, abs=1e-6)


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
    [("nowhere", "holds no adapter"), ("model", "holds no adapter"), ("adapter-of-rank-2", "has rank 2 on 47 modules")],
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


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, world, base):
    """Four updates of an adapter with averaged weights, that got worse after the second: the best is not the last."""
    from flowrl.run.config import from_dict
    from flowrl.run.prepare import prepare
    from flowrl.run.train import train

    scores = iter([0.0, 2.0, 1.0])

    def odd(images):
        """Of the three held-out prompts whatever comes next; of a rollout how red they are."""
        if len(images) == 3:
            return [next(scores)] * 3
        return (images[:, 0] - images[:, 1:].mean(1)).mean((1, 2)).tolist()

    given = {
        "model": {"path": str(base), "grid": "linear", "max_sequence_length": 0, "lora": {"rank": 4, "alpha": 16}},
        "data": {"train": str(world / "train.jsonl"), "test": str(world / "test.jsonl")},
        "rewards": {"odd": 1.0},
        "recipe": {"name": "flow_grpo", "rollout.steps": 4, "rollout.roots": 4},
        "budget": {"updates": 4, "prompts_per_update": 2},
        "optimizer": {"learning_rate": 0.03, "ema": 0.5},
        "evaluation": {"prompts": 3, "every": 2},
        "checkpoint": {"keep": 1},
        "output": str(tmp_path_factory.mktemp("tuned") / "run"),
    }
    return train(prepare(from_dict(given), functions={"odd": odd})).directory


def drawn(pipe):
    pipe.set_progress_bar_config(disable=True)
    noise = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    return pipe(
        prompt=["a red circle", "two blue squares"], sigmas=[1.0, 0.75, 0.5, 0.25], latents=noise, guidance_scale=1.0,
        max_sequence_length=0, output_type="pt",
    ).images  # fmt: skip


def opened(folder):
    return StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None, dtype=torch.float32)


def with_adapter(base, folder):
    pipe = opened(base)
    pipe.load_lora_weights(folder)
    return pipe


@pytest.mark.parametrize("which", ["last", "4", "best", "2"])
def test_an_exported_checkpoint_is_what_plain_diffusers_draws(command, tuned, base, tmp_path, which):
    """C58, C63: averaged weights, as an adapter and merged into the base; the last is what the run left behind."""
    for to, merge in (("adapter", []), ("merged", ["--merge"])):
        done = command("export", tuned, "--to", tmp_path / to, "--checkpoint", which, *merge)
        update = {"last": 4, "best": 2}.get(which) or int(which)
        what = "whole pipeline" if merge else "adapter"
        assert done.code == 0, done.err
        assert done.out == f"averaged weights after update {update}: {what} in {tmp_path / to}\n"
    adapter, merged = drawn(with_adapter(base, tmp_path / "adapter")), drawn(opened(tmp_path / "merged"))
    assert (adapter - merged).abs().max() <= 1.01 / 255
    left = drawn(with_adapter(base, tuned / "adapter"))
    assert torch.equal(adapter, left) == (which in ("last", "4"))
    assert (adapter - drawn(opened(base))).abs().max() > 8 / 255


def test_full_weights_are_exported_as_a_pipeline(command, quick, tmp_path):
    done = command("export", quick.folder, "--to", tmp_path / "model")
    assert done.code == 0, done.err
    assert done.out.startswith("averaged weights after update 2: whole pipeline in")
    theirs, ours = (opened(f).transformer.state_dict() for f in (quick.folder / "model", tmp_path / "model"))
    assert all(torch.equal(x, ours[name]) for name, x in theirs.items())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--checkpoint", "bset"], "--checkpoint 'bset': Did you mean 'best'? Accepted: best, last, an update."),
        (["--checkpoint", "3"], "no whole checkpoint of update 3: it is not there. Checkpoints here: 2, 4."),
        (["--to", "{tmp}"], "--to = '{tmp}' exists"),
    ],
)
def test_what_cannot_be_exported_is_refused(refused, tuned, tmp_path, arguments, said):
    arguments = ["--to", tmp_path / "x"] * ("--to" not in arguments) + [
        x.replace("{tmp}", str(tmp_path)) for x in arguments
    ]
    assert said.replace("{tmp}", str(tmp_path)) in refused("export", tuned, *arguments)


def test_an_export_that_means_nothing_is_refused(refused, quick, tmp_path):
    line = refused("export", quick.folder, "--to", tmp_path / "x", "--merge")
    assert "--merge has no effect: the run trains full weights" in line
    assert "is not the directory of a run" in refused("export", tmp_path, "--to", tmp_path / "x")


def test_weights_are_not_exported_onto_another_base(refused, tuned, base, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tuned, copy)
    shutil.copytree(base, tmp_path / "base")
    text = (copy / "run.yaml").read_text(encoding="utf-8")
    (copy / "run.yaml").write_text(text.replace(str(base), str(tmp_path / "base")), encoding="utf-8")
    config = tmp_path / "base" / "scheduler" / "scheduler_config.json"
    config.write_text(config.read_text(encoding="utf-8").replace('"shift": ', '"shift": 1'), encoding="utf-8")
    line = refused("export", copy, "--to", tmp_path / "x")
    assert "model.path has changed since the checkpoint (scheduler/scheduler_config.json)" in line
