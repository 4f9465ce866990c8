"""A run from the first evaluation to the last: what it logs, what it leaves behind, and what a fault leaves whole."""

import gc
import hashlib
import json
import math
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from PIL import Image
from safetensors.torch import load_file

from flowrl import plan, randomness
from flowrl.part import part
from flowrl.run import checkpoint, resume
from flowrl.run.config import from_dict, load
from flowrl.run.evaluation import sample
from flowrl.run.metrics import Progress
from flowrl.run.prepare import evaluation_settings, prepare
from flowrl.run.train import _evaluate, train
from samplers import schedules

pytestmark = pytest.mark.long


def redness(images):
    return (images[:, 0] - images[:, 1:].mean(1)).mean((1, 2)).tolist()


@pytest.fixture
def go(prepared):
    """Prepare the small run with changes, train it, and return (prepared, result)."""

    def run(**changes):
        ready = prepared(**changes)
        return ready, train(ready)

    return run


def logged(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_log_starts_before_any_update_and_ends_with_an_evaluation(quick):
    """The names that scripts rely on, on the quick start cut to two updates."""
    first, middle, last = quick.metrics
    assert [line["iteration"] for line in quick.metrics] == [0, 1, 2]
    assert {"eval/shapes_strict", "eval/shapes_soft"} <= first.keys() and first["forwards"] == first["backwards"] == 0
    assert "grad_norm" not in first and "eval/shapes_strict" not in middle
    assert {"eval/shapes_strict", "eval/shapes_soft"} <= last.keys()
    for line in (middle, last):
        names = {"seconds", "elapsed", "forwards", "backwards", "learning_rate", "grad_norm", "ratio/deviation"}
        assert names | {"reward/shapes_strict", "reward/shapes_soft", "group/zero_spread"} <= line.keys()
        assert 0 <= line["reward/shapes_strict"] <= line["reward/shapes_soft"] + 0.3 <= 1.3
    for tag in ("count", "two_objects", "position"):
        assert f"eval/shapes_strict/{tag}" in first
    assert {name.split("/")[-1] for name in first if name.count("/") == 2} > {"count", "two_objects", "position"}


def test_a_run_counts_what_was_planned(quick):
    """C53: rows of the network in the log equal those of `flowrl plan`, less the rows of advantage 0 skipped."""
    run = load(quick.folder / "run.yaml")
    recipe = run.build_recipe()
    counts = plan.count(recipe, schedules.linear(recipe.rollout.steps))
    for line in quick.metrics[1:]:
        passes = (counts.forwards - counts.rollout_calls) // counts.backwards  # the policy and its snapshots
        assert line["forwards"] - passes * line["backwards"] == 3 * counts.rollout_calls
        assert 0 <= line["backwards"] <= 3 * counts.train_calls
        if line["group/zero_spread"] == 0:
            assert line["backwards"] == 3 * counts.train_calls


def test_branch_grpo_logs_the_rows_of_its_closed_form(go):
    """One prompt on twenty steps: 203 rows to draw the tree, 187 to train it."""
    recipe = {"name": "branch_grpo"}
    _, result = go(recipe=recipe, budget={"updates": 1, "prompts_per_update": 1}, evaluation={"steps": 2, "prompts": 1})
    line = result.metrics[1]
    assert (line["forwards"], line["backwards"]) == (203 + 187, 187)
    assert (line["rollout_calls"], line["train_calls"]) == (203, 187)


def test_a_run_directory_tells_everything(quick):
    names = {path.name for path in quick.folder.iterdir()}
    assert names == {"run.yaml", "recipe.txt", "metrics.jsonl", "samples", "model", "checkpoints", "before_after.png"}
    assert {p.name for p in (quick.folder / "samples").iterdir()} == {"000000.png", "000002.png", "prompts.txt"}
    again = load(quick.folder / "run.yaml")
    assert (again.seed, again.budget.updates, again.output) == (5, 2, str(quick.folder))
    page = (quick.folder / "recipe.txt").read_text()
    roles = [role for role, _ in again.build_recipe().parts() if not role.startswith(("penalties.", "snapshots."))]
    assert page.isascii() and len(roles) > 8 and all(f"# {role}: " in page for role in roles)
    for path in quick.folder.rglob("*.png"):
        Image.open(path).verify()


def test_the_shares_of_time_sum_to_one(quick):
    for line in quick.metrics[1:]:
        shares = {name: share for name, share in line.items() if name.startswith("time/")}
        parts = {"network", "decode", "reward", "optimiser", "waiting", "other"}
        assert set(shares) == {f"time/{part}" for part in parts}
        assert sum(shares.values()) == pytest.approx(1) and all(0 <= share < 1 for share in shares.values())
        assert shares["time/network"] > 0.3


def test_plain_diffusers_draws_the_pictures_of_the_evaluation_from_the_model_folder(quick):
    """C58: model/ of a run with full weights."""
    pipe = StableDiffusion3Pipeline.from_pretrained(
        quick.folder / "model", text_encoder_3=None, tokenizer_3=None, dtype=torch.float32
    )
    pipe.set_progress_bar_config(disable=True)
    assert_same_pictures(quick.folder, pipe, 2)


def assert_same_pictures(folder, pipe, updates, alike=True):
    """The grid of samples/ equals what `pipe` draws from the same noise, to one level of 255."""
    run = load(folder / "run.yaml")
    steps = run.evaluation.steps or run.build_recipe().rollout.steps
    prompts = (folder / "samples" / "prompts.txt").read_text(encoding="utf-8").splitlines()[:4]
    noise = [
        torch.randn(1, 4, 8, 8, generator=randomness.generator(run.evaluation.seed, "evaluation", i, 0))
        for i in range(len(prompts))
    ]
    drawn = pipe(
        prompt=prompts, sigmas=torch.linspace(1, 1 / steps, steps).tolist(), latents=torch.cat(noise),
        guidance_scale=1.0, max_sequence_length=0, output_type="pt",
    ).images  # fmt: skip
    grid = torch.from_numpy(np.array(Image.open(folder / "samples" / f"{updates:06d}.png").convert("RGB")))
    shown = [grid[0:96:3, x : x + 96 : 3].permute(2, 0, 1) / 255 for x in range(0, 98 * len(prompts), 98)]
    difference = (torch.stack(shown) - drawn).abs().max()
    assert (difference <= 1.01 / 255) == alike, difference


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, world, base):
    """Three updates of an adapter of rank 4 and alpha 16 with averaged weights, large steps, evaluated every two."""
    given = {
        "model": {"path": str(base), "grid": "linear", "max_sequence_length": 0, "lora": {"rank": 4, "alpha": 16}},
        "data": {"train": str(world / "train.jsonl"), "test": str(world / "test.jsonl")},
        "rewards": {"redness": 1.0},
        "recipe": {"name": "flow_grpo", "rollout.steps": 4, "rollout.roots": 4, "penalties.kl_mean_over_s2": 0},
        "budget": {"updates": 3, "prompts_per_update": 2},
        "optimizer": {"learning_rate": 0.03, "ema": 0.9},
        "evaluation": {"prompts": 3, "every": 2},
        "output": str(tmp_path_factory.mktemp("adapted") / "run"),
    }
    ready = prepare(from_dict(given), functions={"redness": redness})
    step, seen = ready.learner.step, [weights_of(ready.policy)]
    ready.learner.step = lambda: (step(), seen.append(weights_of(ready.policy)))[0]
    result = train(ready)
    ready.policy.finish("ema")
    return ready, result, seen


def test_evaluations_come_every_so_many_updates_and_at_both_ends(adapted):
    _, result, _ = adapted
    assert [line["iteration"] for line in result.metrics if "eval/redness" in line] == [0, 2, 3]
    assert logged(result.directory) == result.metrics


def test_plain_diffusers_draws_the_pictures_of_the_evaluation_from_the_adapter(adapted, base):
    """C58, C63: the adapter holds the averaged weights that were evaluated; it differs from the base."""
    _, result, _ = adapted
    pipe = StableDiffusion3Pipeline.from_pretrained(base, text_encoder_3=None, tokenizer_3=None, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    assert_same_pictures(result.directory, pipe, 0)
    assert_same_pictures(result.directory, pipe, 3, alike=False)
    pipe.load_lora_weights(result.directory / "adapter")
    assert_same_pictures(result.directory, pipe, 3)
    assert {p.name for p in (result.directory / "adapter").iterdir()} == {"pytorch_lora_weights.safetensors"}


def test_what_is_evaluated_saved_and_left_behind_is_the_average_of_the_weights(adapted):
    """C63: the start counts 1, (1 + n) / (10 + n) is kept at update n; what was trained is something else."""
    ready, result, seen = adapted
    pictures = sample(ready.policy, ready.test, evaluation_settings(ready.run, ready.recipe))
    assert sum(redness(pictures)) / 3 == pytest.approx(result.metrics[-1]["eval/redness"], abs=1e-6)
    average = seen[0]
    for update, raw in enumerate(seen[1:], 1):
        kept = min(0.9, (1 + update) / (10 + update))
        average = [kept * a + (1 - kept) * x for a, x in zip(average, raw, strict=True)]
    left = weights_of(ready.policy)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(left, average, strict=True))
    assert not all(torch.allclose(a, b, atol=1e-4) for a, b in zip(left, seen[-1], strict=True))


def test_the_result_is_a_pipeline_that_draws(adapted):
    _, result, _ = adapted
    assert result.pipeline("a red circle", num_inference_steps=2, max_sequence_length=0, output_type="pt").images.ndim


def test_a_number_of_the_log_tells_that_something_moves(adapted):
    """C24: on-policy is said, the deviation keeps its digits, and the weights move while the loss is about 0."""
    _, result, _ = adapted
    for line in result.metrics[1:]:
        assert line["on_policy"] is True and line["param_delta_norm"] > 1e-3
        assert abs(line["objective/ppo_clip"]) < 1e-4 * line["param_delta_norm"] / 1e-3
        assert line["ratio/deviation"] == float(f"{line['ratio/deviation']:.8g}") <= 1e-5


def test_without_a_penalty_there_is_no_reference_and_no_kl(adapted):
    """C54."""
    ready, result, _ = adapted
    assert ready.recipe.snapshots == {} and not any("kl" in name or "penalty" in name for name in result.metrics[-1])
    calls = 2 * 4 * 4 + 2 * 4 * 3
    assert [line["forwards"] for line in result.metrics[1:]] == [calls] * 3


def test_a_penalty_costs_a_forward_and_moves_the_weights(go, base):
    """C55, C57: one process on a CPU; a penalty is logged, and its coefficient counts."""
    norms = {}
    for weight in (0.0, 1.0):
        recipe = {"name": "flow_grpo", "rollout.steps": 4, "rollout.roots": 2, "penalties.kl_mean_over_s2": weight}
        _, result = go(recipe=recipe, optimizer={"learning_rate": 0.02}, output=f"{base.name}-{weight}")
        norms[weight] = result.metrics[2]["grad_norm"]
        assert ("penalty/kl_mean_over_s2" in result.metrics[2]) == bool(weight)
        assert result.metrics[2]["forwards"] == 2 * 2 * (4 + 3 * (1 + bool(weight)))
    assert result.metrics[1]["penalty/kl_mean_over_s2"] == pytest.approx(0, abs=1e-9)  # at the start they are equal
    assert result.metrics[2]["penalty/kl_mean_over_s2"] > 0 and norms[1.0] != pytest.approx(norms[0.0], rel=1e-3)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def weights_of(policy):
    return [parameter.detach().clone() for _, parameter in policy.trainable()]


@pytest.mark.parametrize("main, copies", [(True, 1), (False, 0)])
def test_only_the_process_that_writes_copies_the_weights_of_an_evaluation(
    prepared, monkeypatch, tmp_path, main, copies
):
    """Eight copies of a model would have to fit into the memory of one machine."""
    ready = prepared()
    ready.processes.main = main
    monkeypatch.setattr(ready.policy, "weights", lambda: {"x": CountsCopies(torch.ones(1))})
    monkeypatch.setattr(ready.policy, "save", lambda folder, weights: folder.mkdir())
    CountsCopies.copied = 0
    (tmp_path / "samples").mkdir()
    _evaluate(ready, tmp_path, 0, Progress(1, shown=False))
    assert CountsCopies.copied == copies and (tmp_path / "adapter").is_dir() == main


class CountsCopies(torch.Tensor):
    """A weight that counts how often it goes to host memory."""

    def cpu(self):
        CountsCopies.copied += 1
        return self

    def to(self, *place, copy=False):
        return self.cpu()


def test_a_reward_that_fails_in_the_middle_of_an_evaluation_leaves_the_weights_as_they_were(prepared):
    """C63: averaged weights are swapped back, bit by bit."""
    seen = {"calls": 0}

    def fragile(images):
        seen["calls"] += 1
        if seen["calls"] == 3:  # the first evaluation, update 1, then the second evaluation
            seen["during"] = weights_of(ready.policy)
            raise RuntimeError("out of luck")
        seen["before"] = weights_of(ready.policy)
        return redness(images)

    ready = prepared(
        functions={"redness": fragile},
        optimizer={"ema": 0.9, "learning_rate": 0.05},
        evaluation={"every": 1},
    )
    step = ready.learner.step
    ready.learner.step = lambda: (step(), seen.update(raw=weights_of(ready.policy)))[0]
    with pytest.raises(ValueError, match="reward 'redness' raised RuntimeError: out of luck"):
        train(ready)
    after = weights_of(ready.policy)
    assert all(torch.equal(a, b) for a, b in zip(after, seen["raw"], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(seen["during"], seen["raw"], strict=True))


def test_a_reward_that_fails_at_first_leaves_no_directory_and_the_next_try_has_its_name(prepared):
    def spoiled(images):
        raise RuntimeError("no key")

    with pytest.raises(ValueError, match="raised RuntimeError: no key"):
        train(prepared(functions={"redness": spoiled}))
    assert train(prepared(budget={"updates": 1})).metrics[-1]["iteration"] == 1


FAULTS = {
    "nan": (lambda scores: [math.nan, *scores[1:]], "returned 1 of 8 values that are not finite: image 0 (prompt '"),
    "none": (lambda scores: [*scores[:5], None, *scores[6:]], "image 5 (prompt '"),
    "few": (lambda scores: scores[1:], "returned 7 values for 8 images"),
    "many": (lambda scores: [*scores, 0.0], "returned 9 values for 8 images"),
    "wide": (lambda scores: torch.tensor([scores, scores]).T, "returned shape (8, 2) for 8 images"),
    "raises": (lambda scores: 1 / 0, "raised ZeroDivisionError: division by zero (test_train.py:"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reward_that_fails_at_update_two_leaves_everything_whole(prepared, fault):
    """C04, C05, C06: named with reward, sample and prompt; the log and the weights of the last evaluation stand."""
    spoil, said = FAULTS[fault]
    calls = []

    def failing(images):
        calls.append(len(images))
        scores = redness(images)
        return spoil(scores) if calls.count(8) == 2 else scores

    ready = prepared(functions={"redness": failing}, optimizer={"learning_rate": 0.05})
    before = weights_of(ready.policy)
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        train(ready)
    assert "reward 'redness'" in str(caught.value) and "\n" not in str(caught.value)
    folder = Path(ready.run.output)
    assert [line["iteration"] for line in logged(folder)] == [0, 1]
    fresh = prepared(output="another")
    fresh.policy.load(folder / "adapter")
    assert all(torch.equal(a, b) for a, b in zip(weights_of(fresh.policy), before, strict=True))


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (1.0, "returned components (strict, soft), but its weight is one number"),
        ({"strict": 1.0}, "component 'soft', which has no weight"),
        ({"strict": 0.7, "sfot": 0.3}, "component 'sfot', which it did not return. Did you mean 'soft'?"),
    ],
)
def test_weights_that_do_not_fit_the_answer_are_found_before_the_first_update(prepared, world, weight, said):
    """C12: by name."""
    data = {"train": str(world / "shapes.jsonl"), "test": None}
    ready = prepared(rewards={"shapes": {"weight": weight}}, data=data, evaluation={"prompts": 1, "steps": 1})
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        train(ready)
    assert "reward 'shapes'" in str(caught.value) and not (Path(ready.run.output) / "metrics.jsonl").exists()
    assert ready.learner.updates == 0


@pytest.mark.parametrize("fault", ["nan", "raises"])
def test_on_error_mask_leaves_the_sample_out_and_goes_on(prepared, fault):
    """C04: one sample or all of an update; the weights stay finite, and the number is logged."""
    spoil, calls = FAULTS[fault][0], []

    def failing(images):
        calls.append(len(images))
        scores = redness(images)
        return spoil(scores) if calls.count(8) == 1 and len(images) == 8 else scores

    ready = prepared(functions={"redness": failing}, rewards={"redness": {"on_error": "mask"}})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = train(ready)
    assert [line["reward/invalid"] for line in result.metrics[1:]] == [1 if fault == "nan" else 8, 0]
    assert all(bool(parameter.isfinite().all()) for parameter in weights_of(ready.policy))
    if fault == "raises":
        assert result.metrics[1]["grad_norm"] == 0 and result.metrics[1]["backwards"] == 0
    assert result.metrics[2]["grad_norm"] > 0


def test_a_reward_of_weight_zero_is_evaluated_and_never_trained(go):
    """C97: not even called in training, where its answer would leave every picture out; the run is the same."""
    calls, numbers = [], []

    def watched(images):
        calls.append(len(images))
        return [0.25] * len(images) if len(images) == 3 else [math.nan] * len(images)

    for i, rewards in enumerate(({"redness": 1.0, "watched": 0}, {"redness": 1.0})):
        _, result = go(functions={"watched": watched}, rewards=rewards, output=f"run-{i}")
        numbers.append([(line["grad_norm"], line["param_delta_norm"]) for line in result.metrics[1:]])
        assert [line.get("eval/watched") for line in result.metrics] == ([0.25, None, 0.25] if i == 0 else [None] * 3)
        assert not any("reward/watched" in line for line in result.metrics)
        assert result.metrics[0]["eval/total"] == result.metrics[0]["eval/redness"]
    assert calls == [3, 3] and numbers[0] == numbers[1]


def test_every_evaluation_carries_its_settings(go, capsys):
    """C98: in the log and in the line, and no other update does."""
    _, result = go(evaluation={"steps": 3, "guidance": 2, "seed": 5}, optimizer={"ema": 0.9})
    known = {"steps": 3, "size": "32x32", "guidance": 2.0, "kernel": "ode", "weights": "averaged", "seed": 5}
    assert [line.get("evaluation") for line in logged(result.directory)] == [known, None, known]
    line = "(3 prompts; steps 3, size 32x32, guidance 2.0, kernel ode, weights averaged, seed 5)"
    assert capsys.readouterr().out.count(line) == 2


def test_pictures_that_turn_grainy_are_told_once(prepared, capsys):
    """C97: a policy that adds a checkerboard, more of it at every evaluation."""
    ready, strength = prepared(budget={"updates": 3}, evaluation={"every": 1}), iter([0.0, 0.0, 0.3, 0.4])
    decode = ready.policy.decode
    board = 0.5 - (torch.arange(32)[:, None] + torch.arange(32)) % 2

    def evaluated(latents):
        pictures = decode(latents)
        return (pictures + next(strength) * board).clamp(0, 1) if len(pictures) == 3 else pictures  # held out: 3

    ready.policy.decode = evaluated
    result = train(ready)
    shares = [line["eval/image/high_frequency"] for line in result.metrics]
    assert shares[1] < 2 * shares[0] < shares[2] < shares[3]
    said = [line for line in capsys.readouterr().out.splitlines() if "turn grainy" in line]
    assert len(said) == 1 and "a KL or velocity penalty, a lower learning rate, averaged weights" in said[0]


def test_rewards_that_are_all_equal_train_nothing_and_are_counted(go):
    """C01."""
    _, result = go(
        functions={"redness": lambda images: [0.5] * len(images)},
        recipe={"name": "flow_grpo", "rollout.steps": 4, "rollout.roots": 4, "penalties.kl_mean_over_s2": 0},
        optimizer={"weight_decay": 0},
    )
    for line in result.metrics[1:]:
        assert line["group/zero_spread"] == 1 and line["backwards"] == 0 and line["grad_norm"] == 0
        assert line["param_delta_norm"] == 0 and line["objective/ppo_clip"] == 0


def test_each_distinct_prompt_is_encoded_once_in_a_run_and_no_negative_without_guidance(prepared):
    """D3, C44: eight draws of six prompts and three held-out ones, evaluated twice."""
    recipe = {"name": "flow_grpo_fast", "rollout.steps": 6, "rollout.roots": 2}
    ready, texts = prepared(budget={"updates": 4}, recipe=recipe), []
    encode = ready.policy.pipe.encode_prompt
    ready.policy.pipe.encode_prompt = lambda prompt, **rest: texts.extend(prompt) or encode(prompt=prompt, **rest)
    train(ready)
    assert sorted(texts) == sorted({e.prompt for e in (*ready.train, *ready.test)}) and len(texts) == 9


@pytest.mark.parametrize(("rollout", "evaluation"), [(1, 3), (3, 1)])
def test_rollout_and_evaluation_may_have_another_guidance(prepared, rollout, evaluation):
    """C45: each pass runs with its own, also right after the other."""
    recipe = {"name": "flow_grpo_fast", "rollout.steps": 6, "rollout.roots": 2, "rollout.guidance": rollout}
    ready = prepared(recipe=recipe, evaluation={"guidance": evaluation, "steps": 2})
    result = train(ready)
    rows = 2 * 2 * (6 + 3) * (2 if rollout > 1 else 1)
    assert [line["forwards"] for line in result.metrics[1:]] == [rows, rows]
    assert all(line["ratio/deviation"] <= 1e-5 for line in result.metrics[1:])


def test_dropout_of_a_pipeline_in_training_mode_stays_off(go, base):
    """C25: the ratio is 1 and stays so."""
    pipe = StableDiffusion3Pipeline.from_pretrained(base, text_encoder_3=None, tokenizer_3=None, dtype=torch.float32)
    for block in pipe.transformer.transformer_blocks:
        block.attn.to_out[1].p = 0.5
    pipe.transformer.train()
    _, result = go(pipe=pipe)
    assert all(line["ratio/deviation"] <= 1e-5 for line in result.metrics[1:])


def test_one_seed_is_one_run_and_another_is_another(go):
    """Bit by bit on one CPU."""
    one, same, other = (go(seed=seed, output=f"run-{i}")[1].metrics for i, seed in enumerate((1, 1, 2)))

    def numbers(line):
        return {name: x for name, x in line.items() if name not in ("seconds", "elapsed")}

    assert [numbers(line) for line in one] == [numbers(line) for line in same]
    assert numbers(other[1]) != numbers(one[1]) and other[0]["eval/redness"] == one[0]["eval/redness"]


def test_nothing_touches_the_global_generators(go):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    go()
    assert torch.equal(torch.get_rng_state(), state)


def test_memory_does_not_grow_with_updates(prepared):
    """C92: number and bytes of live tensors after update 3 and after update 7 are the same."""
    recipe = {"name": "flow_grpo", "rollout.steps": 3, "rollout.roots": 2}
    ready, seen = prepared(budget={"updates": 7}, recipe=recipe), []
    step = ready.learner.step

    def counted():
        log = step()
        gc.collect()
        live = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
        seen.append((len(live), sum(x.untyped_storage().nbytes() for x in live)))
        return log

    ready.learner.step = counted
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(ready)
    assert len(set(seen[2:])) == 1, seen


def test_prompts_that_cannot_be_printed_reach_the_files(go, tmp_path):
    """C75, C76: emoji, 400 characters and slashes; the log round-trips."""
    odd = ["a red \U0001f98a", "word/" * 80, "two green squares"]
    (tmp_path / "odd.txt").write_text("\n".join(odd), encoding="utf-8")
    _, result = go(data={"train": str(tmp_path / "odd.txt"), "test": None})
    assert (result.directory / "samples" / "prompts.txt").read_text(encoding="utf-8").splitlines() == odd
    assert len(logged(result.directory)) == 3


def test_the_first_evaluation_is_of_the_base(go, base):
    """Whatever is trained: bit for bit the same pictures."""
    digests = set()
    for i, model in enumerate(({}, {"train": "full", "lora": None})):
        _, result = go(model=model, budget={"updates": 1, "prompts_per_update": 1}, output=f"run-{i}")
        digests.add(hashlib.sha256((result.directory / "samples" / "000000.png").read_bytes()).hexdigest())
        assert math.isfinite(result.metrics[0]["eval/redness"])
    assert len(digests) == 1


# Numbers that are none.


def test_a_loss_that_is_not_a_number_stops_the_run_and_names_the_term(prepared):
    """D9: before anything is stepped on; the prompts of the batch are named, the last checkpoint is whole."""

    def broken(ratio, advantage):
        calls.append(1)
        return ratio * (math.nan if len(calls) == 2 else 1.0) * advantage

    calls: list[int] = []
    ready = prepared(checkpoint={"every": 1}, budget={"updates": 4})
    ready = replace(ready, recipe=ready.recipe.but(objective=part(broken), penalties=(), snapshots={}))
    before = {}
    step = ready.learner.step
    ready.learner.step = lambda: (before.update({ready.learner.updates: weights_of(ready.policy)}), step())[1]
    with pytest.raises(
        RuntimeError, match=r"^update 2: objective/broken is nan, so the run stops\. 2 prompts: "
    ) as stop:
        train(ready)
    named = str(stop.value).split("prompts: ")[1].split("; ")
    assert len(named) == 2 and set(named) <= {e.prompt for e in ready.train}
    assert all(torch.equal(a, b) for a, b in zip(weights_of(ready.policy), before[1], strict=True))
    assert [line["iteration"] for line in logged(Path(ready.run.output))] == [0, 1]
    assert checkpoint.newest(Path(ready.run.output) / "checkpoints")[0].facts["update"] == 1


def test_a_step_that_is_skipped_names_parameter_and_prompts_and_is_in_the_checkpoint(prepared, capsys):
    """C107: in the log, on the screen, and counted on after a resume."""
    ready = prepared(checkpoint={"every": 1})
    step = ready.learner.step

    def poisoned():
        if ready.learner.updates == 0:
            ready.learner.parameters[3].grad[0, 0] = math.inf
        return step()

    ready.learner.step = poisoned
    line = train(ready).metrics[1]
    name = ready.learner.names[3]
    assert line["nonfinite_parameter"] == name and line["param_delta_norm"] == 0
    assert len(line["nonfinite_prompts"]) == 2 and set(line["nonfinite_prompts"]) <= {e.prompt for e in ready.train}
    said = f"warning: update 1 skips an optimizer step, the gradient of {name} is not finite; prompts: "
    assert said + "; ".join(line["nonfinite_prompts"]) in capsys.readouterr().out
    counters = checkpoint.newest(Path(ready.run.output) / "checkpoints")[0].facts["learner"]
    assert counters == {"updates": 2, "skipped": 1, "in_a_row": 0}


# The best, and enough of it.


def scored(*values):
    """A reward that gives the held-out pictures (three) one value after the other, and rollouts how red they are."""
    left = iter(values)
    return lambda images: [next(left)] * 3 if len(images) == 3 else redness(images)


def standing(folder):
    return checkpoint.newest(Path(folder) / "checkpoints")[0].facts["standing"]


@pytest.mark.parametrize(
    ("values", "ends", "best"),
    [((0.0, 1.0, 1.0, 0.5), 3, 1), ((3.0, 1.0, 2.0), 2, 0), ((0.0, 1.0, 0.5, 2.0, 1.0, 1.5, 9.0), 5, 3)],
)
def test_a_run_without_a_new_best_ends(prepared, capsys, values, ends, best):
    """Patience of two evaluations; an equal score is no new best."""
    ready = prepared(
        functions={"redness": scored(*values)},
        evaluation={"every": 1, "patience": 2},
        budget={"updates": 9},
        checkpoint={"keep": 1},
    )
    result = train(ready)
    assert [line["iteration"] for line in result.metrics] == list(range(ends + 1))
    said = f"no new best in 2 evaluations since update {best}: the run ends after update {ends} (evaluation.patience)."
    assert said in capsys.readouterr().out
    assert standing(result.directory)["best"] == max(values[: ends + 1])
    kept = {path.name for path in (result.directory / "checkpoints").iterdir()}
    assert kept == {f"{best:06d}", f"{ends:06d}"} and (result.directory / "before_after.png").is_file()


def test_patience_is_counted_on_after_a_resume(prepared):
    """Two evaluations without a best, a stop, a third one: the end."""
    settings = {"evaluation": {"every": 1, "patience": 3}, "budget": {"updates": 9}, "checkpoint": {"every": 1}}

    def failing(images):
        return {3: lambda: [next(left)] * 3, 8: lambda: redness(images)}[len(images)]()

    left = iter((5.0, 1.0, 2.0))
    with pytest.raises(ValueError, match="StopIteration"):
        train(prepared(functions={"redness": failing}, **settings))
    left = iter((3.0, 4.0))
    run = resume.load(Path("run"), ())
    result = train(prepare(run, functions={"redness": failing}, resume=True))
    assert [line["iteration"] for line in result.metrics] == [0, 1, 2, 3]
    assert standing("run") == {"update": 3, "pending": None, "best": 5.0, "best_update": 0, "stale": 3}
    again = train(prepare(run, functions={"redness": failing}, resume=True))
    assert len(again.metrics) == 4  # it has ended


@pytest.mark.parametrize(("name", "best"), [(None, 1), ("eval/redness/count", 2)])
def test_the_best_is_the_weighted_total_or_what_the_settings_name(prepared, name, best):
    """Held out are two prompts of `count`, then one of another kind; a second reward weighs against the first."""
    values = iter([(0.0, 0.0, 0.0), (1.0, 1.0, 9.0), (3.0, 3.0, -9.0)])

    def uneven(images):
        return list(next(values)) if len(images) == 3 else redness(images)

    ready = prepared(
        functions={"redness": uneven, "dark": lambda images: [1.0] * len(images)},
        rewards={"redness": 1.0, "dark": -0.5},
        data={"test": str(write_held_out())},
        evaluation={"every": 1},
        checkpoint={"best": name} if name else {},
    )
    result = train(ready)
    assert standing(result.directory)["best_update"] == best
    line = result.metrics[best]
    expected = line[name] if name else line["eval/redness"] - 0.5 * line["eval/dark"]
    assert standing(result.directory)["best"] == pytest.approx(expected, abs=1e-6)


def write_held_out():
    rows = [("two blue squares", "count"), ("three red squares", "count"), ("a green cross", "one_object")]
    text = "".join(json.dumps({"prompt": prompt, "tag": tag}) + "\n" for prompt, tag in rows)
    Path("held_out.jsonl").write_text(text, encoding="utf-8")
    return Path("held_out.jsonl").absolute()


def test_scores_that_are_all_masked_are_no_best(prepared):
    """A mean of nothing is nan, and nan is not made into a number."""

    def failing(images):
        return [math.nan] * 3 if len(images) == 3 else redness(images)

    ready = prepared(functions={"redness": failing}, rewards={"redness": {"on_error": "mask"}})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = train(ready)
    assert standing(result.directory)["best"] is None and standing(result.directory)["stale"] == 2


# A warm start.


def test_a_warm_start_takes_the_weights_of_an_adapter_and_nothing_else(adapted, prepared):
    """C62: another thing than a resume: updates, optimiser and log begin anew, and the reference is the base."""
    _, result, _ = adapted
    saved = load_file(result.directory / "adapter" / "pytorch_lora_weights.safetensors")
    ready = prepared(model={"init_adapter": str(result.directory / "adapter")}, optimizer={"ema": 0.9})
    start = weights_of(ready.policy)
    assert sum(float(x.square().sum()) for x in saved.values()) == pytest.approx(
        sum(float(x.square().sum()) for x in start), rel=1e-6
    )
    assert ready.learner.updates == 0 and not ready.learner.optimizer.state
    metrics = train(ready).metrics
    assert [line["iteration"] for line in metrics] == [0, 1, 2]
    assert metrics[0]["eval/redness"] == pytest.approx(result.metrics[-1]["eval/redness"], abs=1e-6)
    assert metrics[0]["eval/redness"] != pytest.approx(result.metrics[0]["eval/redness"], abs=1e-4)
    assert metrics[1]["penalty/kl_mean_over_s2"] > 1e-6  # of a run that begins at the base it is 0


def test_a_resumed_run_needs_the_adapter_that_it_began_with_no_more(adapted, prepared, tmp_path):
    """And does not take its weights again."""
    shutil.copytree(adapted[1].directory / "adapter", tmp_path / "adapter")
    train(prepared(model={"init_adapter": str(tmp_path / "adapter")}))
    shutil.rmtree(tmp_path / "adapter")
    run = resume.load(Path("run"), ["budget.updates=3"])
    result = train(prepare(run, functions={"redness": redness}, resume=True))
    assert [line["iteration"] for line in result.metrics] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"rank": 8, "alpha": 16}, r"has rank 4 on 47 modules \(.*\); model\.lora says rank 8 on 47 modules"),
        ({"rank": 4, "alpha": 16, "targets": ["attn.to_q"]}, r"model\.lora says rank 4 on 6 modules \(attn\.to_q\)"),
        ({"rank": 4, "alpha": 4}, r"was trained with alpha 16; model\.lora\.alpha = 4 differs"),
    ],
)
def test_a_warm_start_that_does_not_fit_is_refused_with_both(adapted, prepared, lora, said):
    with pytest.raises(ValueError, match=rf"^model\.init_adapter = '.*adapter'.*{said}"):
        prepared(model={"init_adapter": str(adapted[1].directory / "adapter"), "lora": lora})
    with pytest.raises(ValueError, match=r"^model\.init_adapter = 'nowhere' holds no adapter"):
        prepared(model={"init_adapter": "nowhere"})
