"""The shipped pipeline: its folder, its prompts, and that it draws what they ask."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from shapes_evaluation import SETTINGS, Setting, generate, pick
from shapes_models import load_pipeline

from rewards import shapes
from rewards.shapes_world import KINDS, all_scenes, metadata, split

FOLDER = Path(__file__).parents[1] / "assets" / "shapes"
PLAIN = SETTINGS[0]


def lines_of(side):
    return [json.loads(line) for line in (FOLDER / f"{side}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def pipeline():
    return load_pipeline(str(FOLDER))


@pytest.fixture(scope="module")
def sample(pipeline):
    """16 held-out prompts of each kind, and their verdict at T=10 and guidance 1."""
    lines = pick(lines_of("test"), 16, seed=1)
    pictures = generate(pipeline, [line["prompt"] for line in lines], PLAIN, seed=1)
    return lines, pictures, shapes.load()(pictures, [line["include"] for line in lines])


def test_the_folder_holds_at_most_ten_megabytes_and_no_pickle():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert 7e6 < sum(path.stat().st_size for path in files) <= 10e6
    assert {path.suffix for path in files} == {".json", ".jsonl", ".md", ".safetensors"}


def test_weights_are_bf16_on_disk():
    for path in FOLDER.rglob("*.safetensors"):
        kinds = {tensor.dtype for tensor in load_file(path).values() if tensor.is_floating_point()}
        assert kinds == {torch.bfloat16}, path.name


def test_prompt_files_hold_the_whole_world_split_by_scene():
    scenes = [scene for of_kind in all_scenes().values() for scene in of_kind]
    for side in ("train", "test"):
        assert lines_of(side) == [metadata(scene) for scene in scenes if split(scene) == side]


def test_at_least_500_prompts_of_every_kind_are_held_out_and_none_is_shared():
    train, test = lines_of("train"), lines_of("test")
    assert len(test) >= 500 and set(Counter(line["tag"] for line in test)) == set(KINDS)
    assert not {line["prompt"] for line in train} & {line["prompt"] for line in test}
    assert len({line["prompt"] for line in [*train, *test]}) == len(train) + len(test) == 3012


def test_the_pipeline_is_what_its_card_says(pipeline):
    transformer = sum(p.numel() for p in pipeline.transformer.parameters())
    assert 3.3e6 < transformer < 3.7e6 and f"{transformer / 1e6:.2f} M" in (FOLDER / "README.md").read_text()
    assert pipeline.transformer.dtype == pipeline.vae.dtype == torch.float32
    assert pipeline.scheduler.config.shift == 1 and pipeline.tokenizer_max_length == 10
    assert pipeline.default_sample_size * pipeline.vae_scale_factor == 32


def test_held_out_prompts_are_followed_about_half_of_the_time(sample):
    """Enough to learn from, with room to learn; the standard error of 80 pictures is 0.055."""
    _, pictures, marks = sample
    assert pictures.shape == (80, 3, 32, 32) and pictures.min() >= 0 and pictures.max() <= 1
    assert 0.3 < marks["strict"].mean() < 0.7
    assert 0.5 < marks["soft"].mean() < 0.9


def test_one_object_is_easier_than_the_kinds_left_to_learn(sample):
    _, _, marks = sample
    by_kind = dict(zip(KINDS, marks["strict"].view(len(KINDS), -1).mean(1).tolist(), strict=True))
    assert by_kind["one_object"] >= 0.6
    assert 0.2 < (by_kind["count"] + by_kind["two_objects"] + by_kind["position"]) / 3 < 0.7


def test_numbers_are_sometimes_right(pipeline):
    lines = [line for line in pick(lines_of("test"), 40, seed=2) if line["tag"] == "number"]
    pictures = generate(pipeline, [line["prompt"] for line in lines], PLAIN, seed=2)
    assert shapes.load()(pictures, [line["include"] for line in lines])["strict"].mean() >= 0.1


def test_diffusers_default_of_256_zero_tokens_draws_as_well(pipeline, sample):
    """20 pictures, a standard error of 0.11: only a collapse is caught here, the card has the measured ratio."""
    lines, _, marks = sample
    zeros = Setting("256 zero tokens", zero_tokens=256)
    pictures = generate(pipeline, [line["prompt"] for line in lines[::4]], zeros, seed=1)
    long = shapes.load()(pictures, [line["include"] for line in lines[::4]])
    assert long["strict"].mean() >= 0.6 * marks["strict"].mean()


def test_a_prompt_of_another_world_draws_something(pipeline):
    odd = ["a dragon on a bicycle", "", "a red circle left of a blue square above a green cross " * 3]
    assert generate(pipeline, odd, Setting("two steps", steps=2), seed=0).isfinite().all()
