"""The rewards of a run: checked before the processes meet, loaded where each process computes."""

import sys

import pytest
import torch

import rewards.jpeg_size
from flowrl.run import prepare as module
from flowrl.run import scoring
from flowrl.run.config import from_dict
from flowrl.visual.policy import Example


@pytest.fixture
def events(monkeypatch):
    """What happens in which order; the process that this one becomes computes on cpu:0."""
    seen = []

    class Met(module.Processes):
        def __init__(self, *given):
            super().__init__(*given)
            self.device = torch.device("cpu", 0)
            seen.append("met")

    def load(device="cpu", *, quality=90):
        seen.append(f"loaded on {device}, quality {quality}")
        return lambda images: images.mean((1, 2, 3))

    monkeypatch.setattr(module, "Processes", Met)
    monkeypatch.setattr(rewards.jpeg_size, "load", load)
    return seen


def test_a_reward_is_loaded_once_and_where_its_process_computes(prepared, events):
    """Before the processes meet, every one of them would take the first GPU."""
    prepared(rewards={"jpeg_size": {"numbers": {"quality": 20}}})
    assert events == ["met", "loaded on cpu:0, quality 20"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"jpg_size": 1.0}, "no such reward"),
        ({"jpeg_size": {"numbers": {"qualty": 3}}}, "Did you mean 'quality'"),
        ({"jpeg_size": 0.0}, "all weights are zero"),
    ],
)
def test_names_numbers_and_weights_are_checked_before_anybody_is_waited_for(prepared, events, wrong, said):
    with pytest.raises(ValueError, match=said):
        prepared(rewards=wrong)
    assert not events


def test_a_file_of_a_user_is_imported_only_with_a_device_to_compute_on(given, tmp_path, monkeypatch):
    """At its import it may create a model, on whatever GPU is the current one then."""
    (tmp_path / "eager_reward.py").write_text("def f(images, *, scale=1):\n    return [scale] * len(images)\n")
    monkeypatch.syspath_prepend(tmp_path)
    given["rewards"] = {"mine": {"function": "eager_reward:f", "weight": {"a": -2.0}, "numbers": {"scale": 3}}}
    declared = scoring.declare(from_dict(given), {})
    assert "eager_reward" not in sys.modules and scoring.weights_by_name(declared) == {"mine_a": -2.0}
    (reward,) = scoring.load(declared, [Example("a circle")], "cpu")
    assert reward.function(images=torch.zeros(2, 3, 4, 4)) == [3, 3] and "eager_reward" in sys.modules
