"""What is checked before anything starts, and the objects of a run."""

import warnings

import pytest
import torch

from flowrl.run import prepare as module
from flowrl.run.config import from_dict
from flowrl.run.prepare import evaluation_settings, pick_device, pick_dtype, read_prompts


def test_a_prepared_run_has_written_nothing(prepared, tmp_path):
    run = prepared()
    assert run.train and run.test and run.learner.updates == 0 and run.policy.forwards == 0
    assert not list(tmp_path.iterdir()) and run.policy.folder == "adapter"


def test_held_out_prompts_are_spread_over_the_file_and_others_come_behind(given, world):
    given["data"]["tags"], given["evaluation"] = ["count"], {"prompts": 2, "others": 1}
    train, test, main, _ = read_prompts(from_dict(given))
    assert {e.metadata["tag"] for e in train} == {"count"} and len(train) == 4
    assert [e.prompt for e in test] == ["two blue squares", "three red squares", "a green cross"] and main == 2


def test_evaluation_takes_the_settings_of_the_rollout_where_it_has_none(given):

    def settings_of(**changes):
        run = from_dict({**given, **changes})
        return evaluation_settings(run, run.build_recipe())

    settings = settings_of(recipe={"name": "flow_grpo", "rollout.steps": 5, "rollout.guidance": 3})
    assert (settings.steps, settings.guidance, settings.samples) == (5, 3.0, 1)
    settings = settings_of(evaluation={"steps": 7, "guidance": 1, "samples": 2, "seed": 4})
    assert (settings.steps, settings.guidance, settings.samples, settings.seed) == (7, 1.0, 2, 4)


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ({}, [0.01, 0.01, 0.01, 0.01]),
        ({"warmup": 3}, [0.0025, 0.005, 0.0075, 0.01]),
        ({"schedule": "linear"}, [0.01, 0.0075, 0.005, 0.0025]),
        ({"schedule": "cosine", "warmup": 1}, [0.005, 0.01, 0.0075, 0.0025]),
    ],
)
def test_the_learning_rate_of_an_update_is_what_the_run_file_says(prepared, changes, rates):
    learner = prepared(budget={"updates": 4}, optimizer={"learning_rate": 0.01, **changes}).learner
    assert [learner.rate(update) for update in range(4)] == pytest.approx(rates)


def test_the_optimiser_is_what_the_run_file_says(prepared):
    settings = {"betas": [0.8, 0.95], "weight_decay": 0.5, "max_grad_norm": 0.25, "learning_rate": 0.02}
    learner = prepared(optimizer=settings, budget={"micro_batch": 3}).learner
    group = learner.optimizer.param_groups[0]
    assert (group["betas"], group["weight_decay"], learner.max_grad_norm) == ((0.8, 0.95), 0.5, 0.25)
    assert (learner.micro_batch, learner.rate(0)) == (3, 0.02)


def test_a_clipped_gradient_is_logged_whole(prepared, loop):
    """The step takes max_grad_norm of it; Adam's first step hides the size, so the gradient itself is looked at."""
    seen = {}
    for limit in (1e9, 1e-6):
        run = prepared(optimizer={"max_grad_norm": limit})
        parameters = [p for _, p in run.policy.trainable()]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        step = run.learner.optimizer.step
        run.learner.optimizer.step = lambda step=step, parameters=parameters, limit=limit: (
            seen.update({limit: torch.cat([p.grad.flatten() for p in parameters]).norm().item()}) or step()
        )
        log = run.learner.step()
        assert log["grad_norm"] == pytest.approx(sum(p.numel() for p in parameters) ** 0.5)
    assert seen[1e-6] == pytest.approx(1e-6, rel=1e-3) and seen[1e9] == pytest.approx(log["grad_norm"])


def test_warnings_of_the_prompts_are_kept_for_the_start(prepared, tmp_path):
    """C75: blank, unknown and too long are counted."""
    path = tmp_path / "odd.txt"
    path.write_text("a red circle\n\na dragon\n" + "a red circle left of a blue square and a green cross\n")
    run = prepared(data={"train": str(path)})
    text = "\n".join(run.warnings)
    assert "1 blank lines" in text and "prompts exceed the tokenizer's 10 tokens" in text
    assert "words that the tokenizer does not know. First: 'a dragon'" in text


def fault(prepared, **changes):
    with pytest.raises(ValueError) as caught, warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared(**changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_fewer_prompts_than_an_update_chooses_are_refused_before_a_model_is_loaded(prepared, monkeypatch):
    monkeypatch.setattr(module, "load_policy", None)
    recipe = {"name": "superflow", "rollout.roots": 5, "rollout.steps": 4}
    said = fault(prepared, recipe=recipe, budget={"prompts_per_update": 500})
    assert said.startswith("budget.prompts_per_update = 500 of ") and "draw fewer" in said


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        ({"strict": 0.0, "soft": 0.0}, "all weights are zero (shapes_strict, shapes_soft)"),
        ({}, "weight is empty"),
    ],
)
def test_weights_that_do_not_fit_a_reward_are_found_before_the_start(prepared, weight, said, world):
    """C12: by name, and before a file is written."""
    rewards = {"shapes": {"weight": weight}}
    assert said in fault(prepared, rewards=rewards, data={"train": str(world / "shapes.jsonl"), "test": None})


def test_a_negative_weight_is_accepted(prepared):
    """C12."""
    run = prepared(rewards={"redness": -2.0, "jpeg_size": 0.0})
    rows = torch.rand(2, 3, 8, 8), run.train[:2], torch.zeros(2, dtype=torch.long)
    table = run.score_held_out(*rows)
    assert table.weight.tolist() == [-2.0, 0.0] and table.names == ("redness", "jpeg_size")
    assert run.score(*rows).names == ("redness",)


def test_a_run_needs_a_reward_that_is_trained(prepared):
    """C97: a weight of 0 watches; nothing would be left to learn from."""
    assert "all weights are zero (redness); give one a weight" in fault(prepared, rewards={"redness": 0.0})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recipe": {"name": "flow_grpo", "rollout.kernel.eta": 0}}, "draws no noise at step 0"),
        ({"recipe": {"name": "flow_grpo", "rollout.roots": 1}}, "rollout.roots = 1 makes groups of one"),
        ({"rewards": {"shapse": 1.0}}, "reward 'shapse': no such reward. Did you mean 'shapes'?"),
        ({"rewards": {"jpeg_size": {"numbers": {"qualty": 3}}}}, "Did you mean 'quality'?"),
        ({"rewards": {"mine": {"function": "nowhere:f"}}}, "cannot import 'nowhere'"),
        ({"rewards": {"shapes": {"weight": {"strict": 1, "soft": 0}}}}, "parameter 'include' is not available"),
        ({"model": {"size": 30}}, "model.size = 30: accepted are multiples of"),
        ({"model": {"lora": {"targets": ["attn.to_qq"]}}}, "ends in 'attn.to_qq'. Did you mean 'attn.to_q'?"),
        ({"data": {"tags": ["counts"]}}, "no prompt has the tag 'counts'"),
        ({"data": {"train": "nowhere.txt"}}, "data.train = 'nowhere.txt': no such file"),
        ({"data": {"test": "nowhere.txt"}}, "data.test = 'nowhere.txt': no such file"),
        ({"optimizer": {"betas": [0.9, 1.5]}}, "beta"),
    ],
)
def test_a_fault_is_found_before_the_start(prepared, changes, said):
    assert said in fault(prepared, **changes)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == "cpu"
    with pytest.raises(ValueError, match=r"model\.device = 'cuda': torch sees no GPU here"):
        pick_device("cuda")


@pytest.mark.parametrize(
    ("wanted", "device", "dtype"),
    [("auto", "cpu", torch.float32), ("auto", "cuda", torch.bfloat16), ("float32", "cuda", torch.float32)],
)
def test_the_type_of_frozen_weights_follows_the_device(wanted, device, dtype):
    assert pick_dtype(wanted, torch.device(device)) == dtype


def test_half_precision_on_a_cpu_that_was_picked_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"model\.dtype = bfloat16 .* use float32"):
        pick_dtype("bfloat16", torch.device("cpu"))


@pytest.mark.parametrize(("prompts", "held_out", "said"), [(1, 3, "budget.prompts_per_update = 1"), (2, 1, "held-out")])
def test_more_processes_than_prompts_are_refused(prepared, monkeypatch, prompts, held_out, said):
    """C14: every process trains and evaluates whole prompts."""
    processes = module.Processes

    def two(*given):
        made = processes(*given)
        made.count, made.gather = 2, lambda rows: torch.cat([rows, rows])
        return made

    monkeypatch.setattr(module, "Processes", two)
    changes = {"budget": {"prompts_per_update": prompts}, "evaluation": {"prompts": held_out}}
    assert said in (message := fault(prepared, **changes)) and "2 processes" in message


def test_a_model_distilled_to_few_steps_is_warned_of(prepared, base, tmp_path):
    """C47: by the name of its folder; the run may still be started."""
    (tmp_path / "shapes-turbo").symlink_to(base)
    assert not any("distilled" in warning for warning in prepared().warnings)
    found = prepared(model={"path": str(tmp_path / "shapes-turbo")}).warnings
    assert sum("model 'shapes-turbo' looks distilled to few steps (turbo)" in warning for warning in found) == 1


def test_texts_are_kept_apart_by_all_that_they_depend_on(given, tmp_path):
    """model.dtype = auto is fp32 on a CPU and bf16 on a GPU: neither reads what the other wrote."""
    run, other = (
        from_dict({**given, "model": {**given["model"], "cache": str(tmp_path / "cache"), "max_sequence_length": most}})
        for most in (0, 4)
    )
    folders = {module._cache(run, dtype) for dtype in (torch.float32, torch.bfloat16)}
    folders |= {module._cache(run, torch.float32), module._cache(other, torch.float32)}
    assert len(folders) == 3 and {folder.parent for folder in folders} == {tmp_path / "cache"}
