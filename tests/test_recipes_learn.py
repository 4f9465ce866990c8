"""Every visual recipe on the toy: on-policy at first, the same gradient however it is split, and learning."""

import pytest
import torch

pytestmark = pytest.mark.long


@pytest.mark.parametrize("size", [1, 64])
def test_the_ratio_is_one_before_the_first_update(toy, loop, recipe, size):
    """C21: against the recorded log-prob; exact where rollout and training batches have the same rows."""
    _, log = loop.gradient(toy(recipe), recipe, size, batch_size=size, examples=loop.examples[: 4 if size > 1 else 1])
    straight = not recipe.rollout.forks  # 64 leaves in every step: a micro-batch of 64 calls is one step
    alone = size == 1 and not recipe.chunks  # a chunk is several calls, however small the micro-batch
    assert log["ratio/deviation"] == 0.0 if alone or straight else log["ratio/deviation"] <= 1e-5


def test_the_ratio_is_one_within_rounding_at_other_batch_shapes(toy, loop, recipe):
    """C23: rollout in sixteens, training in sevens."""
    _, log = loop.gradient(toy(recipe), recipe, 7, batch_size=16)
    assert log["ratio/deviation"] <= 1e-5


def test_the_gradient_does_not_depend_on_the_micro_batch(toy, loop, recipe):
    """C18: one call at a time, seven (with an uneven last one), or all at once."""
    check_micro_batches(toy, loop, recipe, torch.float64, 1e-10)


@pytest.mark.representative
def test_the_gradient_does_not_depend_on_the_micro_batch_beyond_rounding(toy, loop, recipe):
    check_micro_batches(toy, loop, recipe, torch.float32, 2e-6)


def check_micro_batches(toy, loop, recipe, dtype, bound):
    of = {size: loop.gradient(toy(recipe, dtype), recipe, size, examples=loop.examples[:2]) for size in (1, 7, 10_000)}
    whole, log = of[10_000]
    bound *= 1 if recipe.rollout.steps < 50 else 2  # more to round
    assert whole.dtype == dtype and whole.norm() > 1e-4
    for gradient, other_log in of.values():
        assert (gradient - whole).norm() <= bound * whole.norm()
        assert other_log["grad_norm"] == pytest.approx(log["grad_norm"], rel=max(bound, 1e-10))


def test_the_reward_rises(toy, loop, recipe):
    """By more than a fifth of the whole range in fifty updates; a wrong sign anywhere would make it fall.

    Where only the best pictures teach, the rate is higher; weighing pictures by raw rewards is slow, as it must be, and
    so are some that learn from memory: they draw four pictures a prompt, or one prompt of four.
    """
    rise = 0.08 if recipe.track else 0.2
    few, slow = recipe.advantage.name.startswith("best"), recipe.advantage.name == "reward_itself"
    policy = toy(recipe)
    learner = loop.learner(policy, rate=1e-2 if few else 2e-3)
    reward = [loop.update(policy, recipe, learner, iteration)["reward/red"] for iteration in range(50)]
    first, last = sum(reward[:5]) / 5, sum(reward[-5:]) / 5
    assert last - first > (0.02 if slow else rise)
