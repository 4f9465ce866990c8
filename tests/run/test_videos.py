"""Runs on a model of videos: what rewards see, what an evaluation says of them, and the files that show them."""

from itertools import islice

import pytest
import torch
from PIL import Image
from tiny_pipelines import tiny

from flowrl.run.config import from_dict
from flowrl.run.evaluation import sample
from flowrl.run.prepare import evaluation_settings, prepare
from flowrl.run.train import train
from rewards import statistics

FRAMES = 5


def motion(videos):
    """Mean distance between neighbouring frames."""
    assert videos.shape[1:] == (FRAMES, 3, 32, 32)
    return videos.diff(dim=1).abs().flatten(1).mean(1)


def red(images):
    return images[:, 0].flatten(1).mean(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "wan"
    tiny()["wan2.1"].build().save_pretrained(folder)
    return folder


@pytest.fixture
def settings(given, model):
    return given | {
        "model": {"path": str(model), "size": 32, "frames": FRAMES, "max_sequence_length": 12},
        "rewards": {"motion": {"function": "film_rewards:motion"}, "red": {"function": "film_rewards:red"}},
        "recipe": {"name": "flow_grpo", "rollout.steps": 3, "rollout.roots": 2, "rollout.guidance": 1.0},
        "evaluation": {"prompts": 2, "samples": 2},
        "optimizer": {"learning_rate": 0.05},
    }


def test_a_model_of_videos_is_trained_evaluated_shown_and_drawn(settings, command, tmp_path, monkeypatch):
    """Numbers of the first evaluation by hand; pictures are middle frames; what `flowrl sample` writes moves."""
    (tmp_path / "film_rewards.py").write_text("from tests.run.test_videos import motion, red\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    ready = prepare(from_dict(settings))
    drawn = sample(ready.policy, ready.test, evaluation_settings(ready.run, ready.recipe))
    assert drawn.shape == (4, FRAMES, 3, 32, 32)
    done = train(ready)
    first, last = done.metrics[0], done.metrics[-1]
    assert first["eval/motion"] == pytest.approx(float(motion(drawn).mean()), rel=1e-5)
    assert first["eval/red"] == pytest.approx(float(red(drawn.flatten(0, 1)).mean()), rel=1e-5)
    saturation = statistics.saturation(drawn.flatten(0, 1)).mean()
    assert first["eval/image/saturation"] == pytest.approx(float(saturation), rel=1e-5)
    pairs = (drawn[0::2] - drawn[1::2]).flatten(1).square().mean(1).sqrt()
    assert first["eval/diversity"] == pytest.approx(float(pairs.mean()), rel=1e-5)
    assert first["evaluation"]["frames"] == FRAMES and last["param_delta_norm"] > 0
    with Image.open(done.directory / "samples" / "000000.png") as grid:
        still = torch.tensor(list(grid.crop((0, 0, 96, 96)).resize((32, 32), Image.Resampling.NEAREST).getdata()))
    assert torch.equal(still.T.reshape(3, 32, 32), (255 * drawn[0, 2]).round().long())
    run = done.directory / "run.yaml"
    said = command("sample", run, "--weights", done.directory / "adapter", "--to", tmp_path / "film.png")
    assert said.code == 0 and "4 videos of 2 prompts in" in said.out, said.err
    with Image.open(tmp_path / "film.png") as film:
        assert film.n_frames == FRAMES and film.size == (2 * 98 - 2, 2 * 98 - 2)
    said = command("draw", done.directory, "--output", tmp_path / "tree.svg")
    assert said.code == 0 and (tmp_path / "tree.svg").read_text().count("data:image/png") == 2, said.err


def test_a_reward_on_videos_is_refused_by_a_model_of_pictures(given):
    with pytest.raises(ValueError, match=r"reward 'motion' scores videos, and this model draws pictures\. Let it ask"):
        prepare(from_dict(given | {"rewards": {"motion": 1.0}}), functions={"motion": motion})


def test_a_model_of_videos_passes_its_checks(command, model):
    said = command("check", model, "model.size=32", f"model.frames={FRAMES}", "model.max_sequence_length=12")
    assert said.code == 0, said.err
    assert list(islice((line for line in said.out.splitlines() if "LoRA" in line), 1))
