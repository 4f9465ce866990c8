"""flowrl/run/optimizers.py: optimisers by name, refused in one line where they cannot run."""

import pytest
import torch
from torch import nn

from flowrl.run import optimizers, packages
from flowrl.run.learner import Learner

WIDTH = 4096  # entries from which on moments are quantised


def learner_over(*parameters, name="adamw_8bit", **changes):
    changes = {"micro_batch": 1, "max_grad_norm": 1e9, "weight_decay": 0.0} | changes
    named = [(str(i), p) for i, p in enumerate(parameters)]
    return Learner(named, lambda update: 1e-2, optimizer=optimizers.find(name), **changes)


def weights(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]


def step(learner, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in learner.parameters:
        p.grad = torch.randn(p.shape, generator=generator)
    return learner.step()


def test_moments_of_eight_bit_take_two_bytes_a_weight():
    learner = learner_over(*weights((64, WIDTH)))
    step(learner, 0)
    kept = [x for values in learner.state().values() for x in values.values() if isinstance(x, torch.Tensor)]
    per_weight = sum(x.nbytes for x in kept) / (64 * WIDTH)
    assert 2 < per_weight < 2.1, "and AdamW's take 8"


def test_eight_bit_steps_stay_close_to_those_of_adamw():
    """Each entry moves by about the rate a step; moments of 8 bits change that by a tenth at most."""
    start = weights((64, WIDTH))[0].detach()
    moved = {}
    for name in ("adamw", "adamw_8bit"):
        learner = learner_over(nn.Parameter(start.clone()), name=name)
        for seed in range(5):
            step(learner, seed)
        moved[name] = learner.parameters[0].detach() - start
    apart = (moved["adamw"] - moved["adamw_8bit"]).norm() / moved["adamw"].norm()
    assert 1e-6 < apart < 0.1


def test_what_was_restored_steps_as_the_original_does():
    """Bit by bit: quantised moments, their scales and codes, and the fp32 moments of a small tensor."""
    one = learner_over(*weights((8, WIDTH), 16))
    for seed in range(3):
        step(one, seed)
    other = learner_over(*[nn.Parameter(p.detach().clone()) for p in one.parameters])
    other.restore(one.state(), one.counters())
    assert {x.dtype for x in other.optimizer.state[other.parameters[0]].values() if isinstance(x, torch.Tensor)} == {
        torch.uint8,
        torch.float32,
    }
    step(one, 3), step(other, 3)
    for mine, theirs in zip(one.parameters, other.parameters, strict=True):
        assert torch.equal(mine, theirs)


def test_a_gradient_that_is_not_finite_leaves_eight_bit_moments_alone():
    learner = learner_over(*weights((8, WIDTH)))
    step(learner, 0)
    before = {q: x["0"].clone() for q, x in learner.state().items() if isinstance(x["0"], torch.Tensor)}
    learner.parameters[0].grad = torch.full((8, WIDTH), float("nan"))
    assert learner.step()["skipped_nonfinite"] == 1
    assert all(torch.equal(before[q], learner.state()[q]["0"]) for q in before)


def test_eight_bit_without_its_package_is_refused_before_a_model_is_loaded(refused, run_file, monkeypatch):
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    line = refused("train", run_file(), "optimizer.name=adamw_8bit")
    assert "optimizer.name = adamw_8bit needs the package bitsandbytes: pip install 'flowrl[memory]'" in line


def test_eight_bit_over_shared_out_weights_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"adamw_8bit does not know weights shared out by FSDP2.*use adamw"):
        optimizers.find("adamw_8bit", sharded=True)
    assert optimizers.find("adamw", sharded=True) is torch.optim.AdamW


def test_an_optimiser_that_does_not_exist_is_refused_with_the_accepted_ones(refused, run_file):
    line = refused("train", run_file(), "optimizer.name=adam")
    assert "optimizer.name" in line and "adamw_8bit" in line
