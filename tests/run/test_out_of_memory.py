"""C91: memory that ends, in every phase."""

import pytest
import torch

from flowrl.run.config import from_dict
from flowrl.run.prepare import prepare
from flowrl.run.train import train

FAULT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB."


def redness(images):
    return images[:, 0].mean((1, 2)).tolist()


def ready(given):
    return prepare(from_dict(given), functions={"redness": redness})


def fails(*args, **kwargs):
    raise torch.OutOfMemoryError(FAULT)


@pytest.mark.parametrize(
    ("owner", "method", "phase", "knob"),
    [
        ("policy", "encode", "encoding texts", "model.offload (now false)"),
        ("policy", "velocity", "the rollout", "budget.batch_size (now 64)"),
        ("policy", "decode", "decoding", "model.vae_tiling (now false)"),
        ("learner", "backward", "the update", "budget.micro_batch (now 7)"),
        ("learner", "step", "the optimiser step", "optimizer.name (now adamw)"),
    ],
)
def test_the_phase_and_three_settings_are_named(given, monkeypatch, owner, method, phase, knob):
    given["budget"]["micro_batch"] = 7
    prepared = ready(given)
    monkeypatch.setattr(getattr(prepared, owner), method, fails)
    with pytest.raises(RuntimeError) as caught:
        train(prepared)
    said = str(caught.value)
    assert f"out of memory in {phase}: CUDA out of memory" in said and knob in said
    assert said.count("(now ") == 3 and "\n" not in said and "GPU 0" not in said


def test_memory_that_ends_with_a_gradient_is_the_updates(given, monkeypatch):
    prepared = ready(given)
    run = prepared.policy.velocity
    monkeypatch.setattr(prepared.policy, "velocity", lambda *a: fails() if torch.is_grad_enabled() else run(*a))
    with pytest.raises(RuntimeError, match=r"out of memory in the update: .*budget\.micro_batch"):
        train(prepared)


def test_a_reward_without_memory_is_named_and_never_left_out(given):
    given["rewards"] = {"greedy": {"on_error": "mask"}}
    with pytest.raises(ValueError, match=r"reward 'greedy' is out of memory \(CUDA out of memory; \d+ images\)"):
        train(prepare(from_dict(given), functions={"greedy": lambda images: fails()}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recipe": {"name": "flow_grpo", "rollout.steps": 4, "rollout.roots": 3}}, "3 pictures per prompt"),
        ({"budget": {"updates": 1, "prompts_per_update": 1}}, "one prompt per update"),
    ],
)
def test_settings_that_fit_but_cannot_learn_are_warned_of(given, changes, said):
    assert not any("mostly noise" in line for line in ready(given).warnings)
    assert any(line.startswith(said) for line in ready(given | changes).warnings)
