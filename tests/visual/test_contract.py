"""flowrl/visual/contract.py: what an adapter has to keep."""

import pytest
import torch

from flowrl.run import config
from flowrl.run.prepare import load_policy
from flowrl.visual.contract import check_direction
from flowrl.visual.policy import Example

EXAMPLES = [Example(f"a {kind}") for kind in ("red circle", "blue square", "green triangle", "yellow circle")]


@pytest.fixture(scope="module")
def base():
    return load_policy(config.load("bench", []), torch.device("cpu"))


WRONG = {
    "the sign of velocity looks reversed": lambda v: lambda x, sigma, prompt: -v(x, sigma, prompt),
    "the direction of time looks reversed": lambda v: lambda x, sigma, prompt: v(x, 1 - sigma, prompt),
    "sign and time look reversed": lambda v: lambda x, sigma, prompt: -v(x, 1 - sigma, prompt),
}


@pytest.mark.parametrize("said", WRONG)
def test_an_adapter_with_the_sign_or_the_time_reversed_is_told_which(base, said, monkeypatch):
    """C38"""
    monkeypatch.setattr(base, "velocity", WRONG[said](base.velocity))
    with pytest.raises(ValueError, match=said):
        check_direction(base, EXAMPLES)


def test_a_right_adapter_explains_its_own_pictures_best(base):
    found = check_direction(base, EXAMPLES)
    assert min(found, key=found.get) == "" and found[""] < 0.35 and min(list(found.values())[1:]) > 0.5


def test_of_weights_that_have_learned_nothing_nothing_is_said(base, monkeypatch):
    monkeypatch.setattr(base, "velocity", lambda x, sigma, prompt: torch.zeros_like(x))
    assert set(check_direction(base, EXAMPLES).values()) == {1.0}
