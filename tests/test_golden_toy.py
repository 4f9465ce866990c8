"""Five numbers per recipe that a refactor must not move, and that a change of method says it moved.

    PYTHONPATH=. python tests/test_golden_toy.py        rewrites tests/golden/toy.json

Everything runs in fp64, the draws too, so that the numbers hold to 1e-9 on any CPU.
"""

import json
from pathlib import Path

import pytest
import torch

from flowrl.recipes import catalogue

pytestmark = pytest.mark.long

FILE = Path(__file__).parent / "golden" / "toy.json"


def five_numbers(make_recipe):
    """Rewards of three updates on two prompts, the last gradient's norm and a weight, from a fresh toy of 16 units."""
    from flowrl.run.learner import Learner
    from flowrl.visual import trainer
    from flowrl.visual.policy import Example
    from flowrl.visual.toy import ToyPolicy
    from rewards.table import RewardTable

    def red(images, examples, group):
        value = images[:, 0].flatten(1)
        return RewardTable(value, torch.ones(1), group, torch.ones(len(value), dtype=torch.bool), ("red",))

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        policy, recipe = ToyPolicy(prompts=2, hidden=16, dtype=torch.float64), make_recipe().check()
        for name, rule in recipe.snapshots.items():
            policy.snapshot(name, rule, 0)
        learner = Learner(policy.trainable(), lambda update: 1e-2, micro_batch=50)
        examples = [Example("0"), Example("1")]
        logs, memory = [], {}
        for iteration in range(3):
            named = {"seed": 0, "iteration": iteration, "batch_size": 30, "memory": memory}
            log, memory = trainer.update(policy, recipe, examples, red, learner, **named)
            logs.append(log)
        weight = policy.net[0].weight
        assert weight.dtype == torch.float64
        return [*(log["reward/red"] for log in logs), logs[-1]["grad_norm"], float(weight.detach().sum())]
    finally:
        torch.set_default_dtype(before)


def test_the_toy_numbers_of_a_recipe_have_not_moved(recipe_function):
    golden = json.loads(FILE.read_text(encoding="utf-8"))
    assert five_numbers(recipe_function) == pytest.approx(golden[recipe_function.__name__], rel=1e-9, abs=1e-12)


def regenerate():
    lines = [f"  {json.dumps(key)}: {json.dumps(five_numbers(make))}" for key, make in catalogue().items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    regenerate()
