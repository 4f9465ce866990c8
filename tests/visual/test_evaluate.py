"""flowrl/visual/evaluate.py: what a recipe asked for, computed with as few runs of the policy as possible."""

from contextlib import contextmanager

import pytest
import torch

from flowrl.recipe import frozen
from flowrl.recipes.visual.steps import flow_cps, flow_grpo
from flowrl.visual.evaluate import evaluate
from flowrl.visual.toy import ToyPolicy
from samplers import density, kernels, schedules

SIGMAS = schedules.linear(10)
RECIPE = flow_grpo()


class Spy(ToyPolicy):
    """The toy, which keeps what it saw: under which snapshot, with or without gradient, and how many rows."""

    def __init__(self, policy):
        vars(self).update(vars(policy), seen=[], name="current")

    def velocity(self, latents, sigma, prompt):
        self.seen.append((self.name, torch.is_grad_enabled(), len(latents)))
        return super().velocity(latents, sigma, prompt)

    @contextmanager
    def at(self, name):
        before, self.name = self.name, name
        with super().at(name):
            yield
        self.name = before


@pytest.fixture
def rows():
    """Six decisions that leave four states."""
    call = torch.tensor([2, 2, 5, 6, 9, 9])
    step = torch.tensor([0, 0, 3, 4, 7, 7])
    latents = torch.randn(10, 2, generator=torch.Generator().manual_seed(0))[call]
    columns = {
        "step": step,
        "sigma": SIGMAS[step],
        "sigma_next": SIGMAS[step + 1],
        "depth": step,
        "call": call,
        "log_prob_old": torch.zeros(6),
    }
    columns |= {"latents": latents, "next_latents": latents * 0.9 + 0.1 * torch.arange(6)[:, None]}
    return {name: column[:, None] for name, column in columns.items()} | {"prompt": call % 4}


@pytest.fixture
def policy(toy):
    """One that has moved away from its reference."""
    policy = toy()
    policy.snapshot("ref", frozen(), 0)
    for _, parameter in policy.trainable():
        parameter.data.mul_(1.05)
    return policy


def test_every_distinct_call_runs_once_and_the_current_policy_last(policy, rows):
    spy = Spy(policy)
    evaluate(spy, rows, {"log_prob", "log_prob_old", "mean", "mean_ref", "std"}, RECIPE, SIGMAS)
    assert spy.seen == [("ref", False, 4), ("current", True, 4)]


def test_no_reference_runs_where_nothing_of_it_is_asked_for(policy, rows):
    """C54: the snapshot exists and stays idle."""
    spy = Spy(policy)
    q = evaluate(spy, rows, {"log_prob", "log_prob_old", "advantage"}, RECIPE, SIGMAS)
    assert spy.seen == [("current", True, 4)] and not any(name.endswith("_ref") for name in q)


def test_quantities_are_those_of_the_kernel_and_the_density(policy, rows):
    names = {"velocity", "velocity_ref", "mean", "mean_ref", "std", "log_prob", "log_prob_ref", "log_prob_old"}
    q = evaluate(policy, rows, names, RECIPE, SIGMAS)
    for suffix, name in (("", "current"), ("_ref", "ref")):
        with policy.at(name), torch.no_grad():
            velocity = policy.velocity(rows["latents"][:, 0], rows["sigma"][:, 0], rows["prompt"])
        at = (rows["latents"][:, 0], velocity, rows["sigma"][:, 0], rows["sigma_next"][:, 0])
        mean, std = kernels.flow_sde(*at, SIGMAS, eta=0.7)
        log_prob = density.gaussian(rows["next_latents"][:, 0], mean, std)
        for quantity, expected in {"velocity": velocity, "mean": mean, "log_prob": log_prob}.items():
            torch.testing.assert_close(q[quantity + suffix][:, 0].detach(), expected)
        torch.testing.assert_close(q["std"][:, 0], std)
    assert not torch.equal(q["mean"], q["mean_ref"])


def test_the_gradient_flows_through_the_current_policy_alone(policy, rows):
    q = evaluate(policy, rows, {"log_prob", "log_prob_old", "mean", "mean_ref"}, RECIPE, SIGMAS)
    assert q["log_prob"].requires_grad and q["mean"].requires_grad
    assert not q["mean_ref"].requires_grad and not q["log_prob_old"].requires_grad


def test_the_old_log_prob_is_the_current_one_and_the_recorded_one_is_kept(policy, rows):
    q = evaluate(policy, rows, {"log_prob", "log_prob_old"}, RECIPE, SIGMAS)
    assert torch.equal(q["log_prob_old"], q["log_prob"].detach())
    assert torch.equal(q["log_prob_recorded"], rows["log_prob_old"])


def test_siblings_take_their_own_step_from_the_velocity_that_they_share(policy, rows):
    """Two decisions leave each of two states, with different ends."""
    q = evaluate(policy, rows, {"log_prob", "log_prob_old", "velocity"}, RECIPE, SIGMAS)
    for first, second in ((0, 1), (4, 5)):
        assert torch.equal(q["velocity"][first], q["velocity"][second])
        assert q["log_prob"][first] != q["log_prob"][second]


def test_a_density_that_needs_no_std_is_asked_without_it(policy, rows):
    """C27: at the last step cps has std 0, and its squared error is finite."""
    rows = rows | {"sigma_next": torch.zeros(6, 1)}
    q = evaluate(policy, rows, {"log_prob", "log_prob_old"}, flow_cps(), SIGMAS)
    assert bool(q["log_prob"].isfinite().all())


def test_a_snapshot_named_old_is_run_for_what_the_rollout_did_not_record(policy, rows):
    policy.snapshot("old", frozen(), 0)
    for _, parameter in policy.trainable():
        parameter.data.mul_(1.05)
    recipe = RECIPE.but(snapshots={"old": frozen()})
    q = evaluate(policy, rows, {"log_prob", "log_prob_old", "mean", "mean_old"}, recipe, SIGMAS)
    assert not torch.equal(q["mean"], q["mean_old"])
    assert torch.equal(q["log_prob_old"], q["log_prob"].detach())
