"""A run from Python."""

import json

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

import flowrl
from flowrl.recipes import find
from flowrl.run.align import align
from flowrl.run.config import load
from flowrl.run.prepare import read_prompts

pytestmark = pytest.mark.long

SMALL = {
    "recipe": {"name": "flow_grpo_fast", "rollout.steps": 6, "rollout.roots": 3},
    "budget": {"prompts_per_update": 2},
    "evaluation": {"prompts": 2},
    "model_settings": {"grid": "linear", "max_sequence_length": 0, "lora": {"rank": 4, "alpha": 16}},
}
PROMPTS = ["a red circle", "two green squares"]


def redness(images):
    return (images[:, 0] - images[:, 1:].mean(1)).mean((1, 2)).tolist()


def opened(base):
    made = StableDiffusion3Pipeline.from_pretrained(base, text_encoder_3=None, tokenizer_3=None, dtype=torch.float32)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture
def pipe(base):
    return opened(base)


def test_align_is_found_at_the_top():
    assert flowrl.align is align and "align" in flowrl.__all__
    with pytest.raises(AttributeError, match="no attribute 'aline'"):
        _ = flowrl.aline


def test_a_function_and_a_list_of_prompts_are_a_run(base, tmp_path):
    result = align(base, rewards=redness, prompts=PROMPTS, updates=2, output=tmp_path / "run", **SMALL)
    assert [line["iteration"] for line in result.metrics] == [0, 1, 2] and "reward/redness" in result.metrics[1]
    assert result.directory == tmp_path / "run" and (result.directory / "adapter").is_dir()
    lines = (result.directory / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == result.metrics
    assert load(result.directory / "run.yaml").budget.updates == 2
    pictures = result.pipeline(PROMPTS, num_inference_steps=2, max_sequence_length=0, output_type="pt").images
    assert pictures.shape == (2, 3, 32, 32)


def test_a_loaded_pipeline_is_trained_in_place(pipe, tmp_path):
    settings = {**SMALL, "model_settings": {"grid": "linear", "max_sequence_length": 0, "train": "full"}}
    before = pipe.transformer.proj_out.weight.detach().clone()
    result = align(pipe, rewards=redness, prompts=PROMPTS, updates=1, output=tmp_path / "run", **settings)
    assert result.pipeline is pipe and not torch.equal(pipe.transformer.proj_out.weight, before)
    saved = StableDiffusion3Pipeline.from_pretrained(
        result.directory / "model", text_encoder_3=None, tokenizer_3=None, dtype=torch.float32
    )
    assert torch.equal(saved.transformer.proj_out.weight, pipe.transformer.proj_out.weight)


@pytest.mark.parametrize(
    ("rewards", "columns"),
    [
        ("jpeg_size", {"reward/jpeg_size"}),
        ({"jpeg_size": 0.5, "red": (redness, -1.0)}, {"reward/jpeg_size", "reward/red"}),
        ({"red": redness}, {"reward/red"}),
        ({"jpeg_size": {"weight": 2.0, "numbers": {"quality": 50}}}, {"reward/jpeg_size"}),
    ],
)
def test_rewards_come_as_a_name_a_function_or_a_mapping(base, tmp_path, rewards, columns):
    settings = {**SMALL, "evaluation": {"prompts": 1, "steps": 1}}
    result = align(base, rewards=rewards, prompts=PROMPTS, updates=1, output=tmp_path / "run", **settings)
    assert columns == {name for name in result.metrics[1] if name.startswith("reward/")} - {"reward/invalid"}


def test_a_recipe_of_ones_own_is_taken_as_it_is(base, tmp_path):
    own = find("dance_grpo")().but(rollout={"steps": 4, "forks": {0: 3}})
    settings = {**SMALL, "recipe": own, "evaluation": {"prompts": 1, "steps": 1}}
    result = align(base, rewards=redness, prompts=PROMPTS, updates=1, output=tmp_path / "run", **settings)
    assert result.metrics[1]["forwards"] - result.metrics[1]["backwards"] == 2 * (1 + 3 * 3)
    assert "# rollout.kernel: dance_sde" in (result.directory / "recipe.txt").read_text()


def test_a_prompt_of_a_list_is_kept_as_it_is(base, tmp_path):
    """C75: line breaks, an empty one, emoji; each stays one prompt."""
    prompts = ["a red circle\nand a blue one", "", "\U0001f98a", "one\u2028two", "c\rd"]
    seen = []

    def remember(images, prompts):
        seen.extend(prompts)
        return redness(images)

    settings = {**SMALL, "evaluation": {"prompts": 5, "steps": 1}}
    result = align(base, rewards=remember, prompts=prompts, updates=1, output=tmp_path / "run", **settings)
    assert set(seen) == set(prompts)
    again = load(result.directory / "run.yaml")
    assert [e.prompt for e in read_prompts(again)[0]] == prompts


def test_a_prompt_file_is_taken_too(base, tmp_path, world):
    settings = {**SMALL, "evaluation": {"prompts": 1, "steps": 1}}
    result = align(base, rewards=redness, prompts=world / "train.jsonl", updates=1, output=tmp_path / "run", **settings)
    assert load(result.directory / "run.yaml").data.train == str(world / "train.jsonl")


@pytest.mark.parametrize("loaded", [True, False])
def test_a_run_from_python_goes_on_from_python(base, pipe, tmp_path, loaded):
    """The same call with `resume`: functions and prompts that no file holds are given again."""
    settings = {**SMALL, "evaluation": {"prompts": 1, "steps": 1, "every": 1}, "output": tmp_path / "run"}
    given = {"rewards": {"mine": redness}, "prompts": PROMPTS, **settings}
    short = align(pipe if loaded else base, updates=2, **given)
    fresh = opened(base) if loaded else base
    result = align(fresh, updates=3, resume=True, **given)
    whole = align(base, updates=3, **{**given, "output": tmp_path / "whole"})
    numbers = [[line["eval/mine"] for line in run.metrics] for run in (result, whole)]
    assert numbers[0] == numbers[1] and len(short.metrics) == 3
    with pytest.raises(ValueError, match=r"data\.train has changed since the checkpoint"):
        align(base, updates=4, resume=True, **{**given, "prompts": [*PROMPTS, "a green cross"]})


@pytest.mark.parametrize("part, name", [("transformer", "proj_out.weight"), ("vae", "decoder.layers.0.weight")])
def test_a_run_does_not_go_on_from_another_pipeline(base, pipe, tmp_path, part, name):
    """C31: an adapter belongs to the base that it was trained on, also where no file tells."""
    settings = {**SMALL, "evaluation": {"prompts": 1, "steps": 1}, "output": tmp_path / "run"}
    align(pipe, rewards=redness, prompts=PROMPTS, updates=1, **settings)
    other = opened(base)
    with torch.no_grad():
        other.components[part].get_parameter(name).flatten()[0].add_(1)
    with pytest.raises(
        ValueError, match=rf"^model\.path has changed since the checkpoint \({part}, weights\): sha256 "
    ):
        align(other, rewards=redness, prompts=PROMPTS, updates=2, resume=True, **settings)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rewards": "jpeg_sise"}, "Did you mean 'jpeg_size'?"),
        ({"prompts": []}, "list of at least one text"),
        ({"recipe": "flow_grop"}, "Did you mean 'flow_grpo'?"),
        ({"bugdet": {}}, "bugdet: no such setting. Did you mean 'budget'?"),
        ({"updates": 0}, "budget.updates = 0"),
        ({"model": object()}, "model is of class object"),
    ],
)
def test_a_fault_is_a_value_error_before_anything_is_written(base, tmp_path, changes, said):
    given = {"rewards": redness, "prompts": PROMPTS, "model": base, **SMALL, **changes}
    with pytest.raises(ValueError) as caught:
        align(given.pop("model"), output=tmp_path / "run", **given)
    assert said in str(caught.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("own", "wanted", "said"),
    [
        (torch.float32, "bfloat16", "model.dtype = bfloat16 is about 100 times slower than float32 on a CPU"),
        (torch.bfloat16, "auto", "the pipeline is in bfloat16, which is about 100 times slower"),
        (torch.float16, "auto", "the pipeline is in float16: accepted are float32 and bfloat16"),
    ],
)
def test_the_dtype_of_a_loaded_pipeline_is_checked_as_that_of_a_folder(pipe, tmp_path, own, wanted, said):
    settings = {**SMALL, "model_settings": {**SMALL["model_settings"], "dtype": wanted, "device": "cpu"}}
    with pytest.raises(ValueError) as caught:
        align(pipe.to(own), rewards=redness, prompts=PROMPTS, updates=1, output=tmp_path / "run", **settings)
    assert str(caught.value).startswith(said) and not list(tmp_path.iterdir())


def test_a_pipeline_that_carries_an_adapter_is_refused_with_the_remedy(pipe, tmp_path):
    settings = {**SMALL, "evaluation": {"prompts": 1, "steps": 1}}
    first = align(pipe, rewards=redness, prompts=PROMPTS, updates=1, output=tmp_path / "one", **settings)
    with pytest.raises(ValueError, match=r"carries adapters already .* fuse them with pipe\.fuse_lora"):
        align(first.pipeline, rewards=redness, prompts=PROMPTS, updates=1, output=tmp_path / "two", **settings)
    assert not (tmp_path / "two").exists()
