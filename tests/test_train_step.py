"""flowrl/train_step.py: one optimiser step, on a model of one number."""

import pytest
import torch

from flowrl.part import part
from flowrl.recipes.visual.steps import flow_grpo
from flowrl.train_step import train_step


class Learner:
    """Splits three rows into the given sizes and keeps the gradient."""

    def __init__(self, theta, sizes):
        self.theta, self.sizes, self.steps = theta, sizes, 0

    def micro_batches(self, points):
        start = 0
        for size in self.sizes:
            yield {name: column[start : start + size] for name, column in points.items()}
            start += size

    def backward(self, loss):
        loss.backward()

    def step(self):
        self.steps += 1
        return {"grad_norm": float(self.theta.grad.abs())}


def squared(log_prob):
    """A penalty that asks for the current policy alone."""
    return log_prob**2


POINTS = {
    "x": torch.tensor([[1.0], [2.0], [-1.0]]),
    "advantage": torch.tensor([[1.0], [-0.5], [2.0]]),
    "weight": torch.tensor([[0.5], [0.25], [0.25]]),
}


def run(sizes, recipe, theta=0.3):
    theta = torch.tensor(theta, requires_grad=True)
    asked = []

    def evaluate(rows, names):
        asked.append(names)
        log_prob = theta * rows["x"]
        return rows | {"log_prob": log_prob, "log_prob_old": log_prob.detach()}

    learner = Learner(theta, sizes)
    log = train_step(recipe, POINTS, evaluate, learner)
    return theta.grad, log, learner, asked


BARE = flow_grpo().but(penalties=(), snapshots={})
PULLED = BARE.but(penalties=((0.1, part(squared)),))


def test_the_loss_is_the_weighted_sum_of_objective_and_penalties():
    """By hand: -sum(w A x) + 0.1 * sum(w * 2 theta x^2), and the values of both terms."""
    gradient, log, learner, _ = run([3], PULLED)
    objective = -(0.5 * 1 * 1 + 0.25 * -0.5 * 2 + 0.25 * 2 * -1)
    square = 0.5 * 1 + 0.25 * 4 + 0.25 * 1
    assert gradient.item() == pytest.approx(objective + 0.1 * 2 * 0.3 * square)
    assert log["objective/ppo_clip"] == pytest.approx(-(0.5 - 0.125 + 0.5))
    assert log["penalty/squared"] == pytest.approx(0.1 * 0.09 * square)
    assert learner.steps == 1


@pytest.mark.parametrize("sizes", [[1, 1, 1], [2, 1], [1, 2]])
def test_the_split_changes_neither_gradient_nor_log(sizes):
    """C18: an uneven last micro-batch too."""
    whole, log, _, _ = run([3], PULLED)
    gradient, split_log, learner, _ = run(sizes, PULLED)
    torch.testing.assert_close(gradient, whole)
    assert split_log == pytest.approx(log) and learner.steps == 1


def test_a_policy_learns_while_its_loss_is_0():
    """C24: centred advantages on one policy; the loss says 0 and the gradient does not."""
    gradient, log, _, _ = run([3], BARE)
    balanced = POINTS | {"advantage": torch.tensor([[1.0], [-1.0], [-1.0]])}
    theta = torch.tensor(0.3, requires_grad=True)

    def evaluate(rows, names):
        return rows | {"log_prob": theta * rows["x"], "log_prob_old": (theta * rows["x"]).detach()}

    log = train_step(BARE, balanced, evaluate, Learner(theta, [3]))
    assert log["objective/ppo_clip"] == pytest.approx(0, abs=1e-7) and log["grad_norm"] > 0.1 and gradient != 0


def test_only_what_the_recipe_needs_is_asked_for():
    _, log, _, asked = run([2, 1], BARE)
    assert asked == [{"log_prob", "log_prob_old", "advantage"}] * 2 and not any("penalty" in name for name in log)


def test_the_log_holds_plain_numbers():
    """C92: a tensor in the log would keep memory, and no JSON."""
    _, log, _, _ = run([3], PULLED)
    assert {type(value) for value in log.values()} == {float}
