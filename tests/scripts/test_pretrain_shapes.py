"""Pretraining: the same seed gives the same weights, interrupted or not, and zero tokens cost one key."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pretrain_shapes
import pytest
import shapes_training
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from shapes_data import SHARES, draw_scenes
from shapes_evaluation import pick
from shapes_models import MAX_TOKENS, TextToVelocity, build_tokenizer, build_transformer, token_ids, vocabulary
from torch.nn.functional import pad

from rewards.shapes_world import KINDS, all_scenes, prompt, split

pytestmark = pytest.mark.long

SCRIPT = Path(pretrain_shapes.__file__)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A process group of this process only."""
    store = tmp_path_factory.mktemp("group") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained_flow(work, seed=0, steps=6):
    """Weights, averages and moments after a tiny training of the flow model on random latents."""
    plan = pretrain_shapes.tiny(pretrain_shapes.Plan())
    rng = torch.Generator().manual_seed(0)
    latents, ids = torch.randn(16, 4, 8, 8, generator=rng), torch.randint(3, 40, (16, MAX_TOKENS), generator=rng)
    torch.manual_seed(seed)
    network = TextToVelocity()
    loss = pretrain_shapes.flow_loss(network, latents, ids, token_ids(build_tokenizer(), [""]))
    shapes_training.train(network, loss, replace(plan.flow, steps=steps), seed, work / "flow.safetensors")
    return load_file(work / "flow.safetensors")


def test_the_same_seed_gives_identical_weights_and_another_seed_does_not(alone, tmp_path):
    works = [tmp_path / name for name in ("first", "again", "other")]
    for work in works:
        work.mkdir()
    first, again, other = (trained_flow(work, seed) for work, seed in zip(works, (0, 0, 1), strict=True))
    assert all(first[name].equal(again[name]) for name in first)
    assert not first["weights"].equal(other["weights"])


def test_a_killed_training_continues_to_the_identical_result(alone, tmp_path, monkeypatch):
    """Killed in step 5, after the checkpoint of step 4; the process starts anew with other initial weights."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir(), broken.mkdir()
    expected = trained_flow(whole)

    def killed(self, decay, real=shapes_training.FlatModule.update_average):
        real(self, decay)
        if self.optimizer.state[self.weights]["step"] == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shapes_training.FlatModule, "update_average", killed)
        trained_flow(broken)
    assert shapes_training.load_checkpoint(broken / "flow.safetensors", {})[0] == 4
    resumed = trained_flow(broken)
    assert resumed["step"] == 6 and all(resumed[name].equal(expected[name]) for name in expected)


def test_training_leaves_the_module_with_the_averaged_weights(alone, tmp_path):
    layer, rng = torch.nn.Linear(3, 1), torch.Generator().manual_seed(0)
    batch = torch.randn(8, 3, generator=rng)
    stage = replace(pretrain_shapes.Plan().autoencoder, steps=40, batch=8)
    shapes_training.train(layer, lambda rng, rows: (layer(batch) - 2).square().mean(), stage, 0, tmp_path / "layer")
    saved = load_file(tmp_path / "layer")
    assert torch.cat([p.flatten() for p in layer.parameters()]).equal(saved["average"])
    assert not saved["average"].equal(saved["weights"]) and not layer.training


def test_one_flat_step_is_an_ordinary_adamw_step(alone):
    torch.manual_seed(0)
    plain, flat = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    flat.load_state_dict(plain.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, betas=(0.9, 0.98), weight_decay=0.01)
    whole, batch = shapes_training.FlatModule(flat, (0.9, 0.98)), torch.randn(5, 4)
    for _ in range(3):
        optimizer.zero_grad()
        plain(batch).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        flat(batch).square().mean().backward()
        whole.step(0.1)
    assert torch.allclose(plain.weight, flat.weight, atol=1e-6) and torch.allclose(plain.bias, flat.bias, atol=1e-6)


def test_the_rate_warms_up_holds_and_decays_by_the_step_alone():
    stage = replace(pretrain_shapes.Plan().flow, steps=1000, rate=1.0, warmup=100, decay=400)
    rates = [stage.rate_at(step) for step in (0, 49, 99, 500, 600, 800, 999)]
    assert rates == pytest.approx([0.01, 0.5, 1, 1, 1, 0.5, 0.01])


@pytest.mark.parametrize("num_zero_tokens", [0, 1, 7, 256])
def test_one_zero_token_with_a_log_n_bias_equals_n_zero_tokens(num_zero_tokens):
    torch.manual_seed(0)
    network, plain = TextToVelocity().eval(), build_transformer().eval()
    for p in network.parameters():
        p.data += 0.05 * torch.randn_like(p)  # the initial output layer and gates are too tame
    plain.load_state_dict(network.transformer.state_dict())
    ids = token_ids(build_tokenizer(), ["a red circle", "the number 42 in orange"])
    latents, sigma = torch.randn(2, 4, 8, 8), torch.tensor([0.3, 0.9])
    first, second = (
        encoder(ids, output_hidden_states=True) for encoder in (network.text_encoder, network.text_encoder_2)
    )
    context = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], -1)
    with torch.no_grad():
        biased = network(latents, sigma, ids, torch.full((2,), float(num_zero_tokens)))
        counted = plain(
            latents,
            pad(context, (0, 0, 0, num_zero_tokens)),
            torch.cat([first.text_embeds, second.text_embeds], -1),
            1000 * sigma,
            return_dict=False,
        )[0]
    assert counted.std() > 0.1 and torch.allclose(biased, counted, atol=1e-5)


def test_zero_tokens_are_drawn_mostly_none_and_else_up_to_256():
    counts = pretrain_shapes.draw_zero_tokens(torch.Generator().manual_seed(0), 20_000)
    some = counts[counts > 0]
    assert (counts == 0).float().mean() == pytest.approx(0.75, abs=0.02)
    assert some.min() == 1 and some.max() == 256 and some.median() == pytest.approx(16, abs=1)
    assert counts.equal(counts.round())


def test_training_draws_every_kind_and_never_a_held_out_scene():
    scenes = draw_scenes(3000, np.random.default_rng(0))
    assert {scene.kind for scene in scenes} == set(KINDS)
    assert all(split(scene) == "train" for scene in scenes)
    assert np.mean([scene.kind == "number" for scene in scenes]) == pytest.approx(SHARES["number"], abs=0.03)


def test_every_prompt_has_its_own_tokens_and_fits():
    prompts = [prompt(scene) for scenes in all_scenes().values() for scene in scenes]
    tokenizer = build_tokenizer()
    ids = token_ids(tokenizer, prompts)
    assert ids.shape == (3012, MAX_TOKENS) and (ids == tokenizer.eos_token_id).any(1).all()
    assert not (ids == tokenizer.unk_token_id).any() and len(ids.unique(dim=0)) == 3012
    assert ids.unique().numel() == len(vocabulary()) - 1  # every token is used but <unk>


def test_an_unknown_word_and_a_long_prompt_are_tokenised():
    tokenizer = build_tokenizer()
    ids = token_ids(tokenizer, ["A red DRAGON", "a red circle left of a blue square and a green cross above"])
    assert ids[0, :5].tolist() == [tokenizer.convert_tokens_to_ids(t) for t in ("<bos>", "a", "red", "<unk>", "<eos>")]
    assert ids.shape == (2, MAX_TOKENS) and ids[1, -1] == tokenizer.eos_token_id


def test_evaluation_picks_equally_many_of_each_kind_and_repeats_a_short_one():
    lines = [{"tag": kind, "prompt": i} for kind in KINDS for i in range(3 if kind == "count" else 50)]
    picked = pick(lines, 10, seed=0)
    assert [line["tag"] for line in picked] == [kind for kind in KINDS for _ in range(10)]
    assert {line["prompt"] for line in picked if line["tag"] == "count"} == {0, 1, 2}
    assert picked != pick(lines, 10, seed=1) and picked == pick(lines, 10, seed=0)


def test_a_work_folder_refuses_another_plan(tmp_path):
    pretrain_shapes.claim(tmp_path, pretrain_shapes.Plan(seed=0))
    pretrain_shapes.claim(tmp_path, pretrain_shapes.Plan(seed=0))
    with pytest.raises(ValueError, match="holds another plan"):
        pretrain_shapes.claim(tmp_path, pretrain_shapes.Plan(seed=1))


@pytest.mark.slow
def test_the_script_builds_a_pipeline_with_two_processes(tmp_path):
    """The whole path in seconds: folder, prompts, card."""
    out = tmp_path / "out"
    run = subprocess.run(
        [sys.executable, SCRIPT, "--tiny", "--out", out, "--work", tmp_path / "work"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "flow: step 6 of 6" in run.stdout and "| test | T=10, guidance 1 |" in (out / "README.md").read_text()
    index = json.loads((out / "model_index.json").read_text())
    assert index["text_encoder_3"] == index["tokenizer_3"] == [None, None]
    assert index["tokenizer"] == ["transformers", "PreTrainedTokenizerFast"]
    assert {path.suffix for path in out.rglob("*") if path.is_file()} == {".json", ".jsonl", ".md", ".safetensors"}
