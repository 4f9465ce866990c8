"""flowrl/run/learner.py: the optimiser behind three verbs."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from flowrl.run.learner import Learner, learning_rate


def net():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return model


def learner_of(model, **changes):
    changes = {"micro_batch": 4} | changes
    return Learner(list(model.named_parameters()), lambda update: 1e-2, **changes)


def backward(learner, model, scale=1.0):
    learner.backward(scale * model(torch.ones(4, 2)).square().mean())


def state(learner):
    moments = [learner.optimizer.state[p] for p in learner.parameters]
    return [p.detach().clone() for p in learner.parameters], [
        {name: value.clone() for name, value in moment.items()} for moment in moments
    ]


def same(one, other):
    weights = all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
    moments = zip(one[1], other[1], strict=True)
    return weights and all(a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) for a, b in moments)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_one_bad_gradient_entry_changes_nothing_and_is_named(poison):
    """C107: weights and moments bit-identical, counted, the parameter named, the next step trains."""
    model = net()
    learner = learner_of(model)
    backward(learner, model)
    learner.step()
    before = state(learner)
    backward(learner, model)
    model[1].weight.grad[0, 1] = poison
    log = learner.step()
    assert same(before, state(learner))
    assert log["skipped_nonfinite"] == 1 and log["nonfinite_parameter"] == "1.weight"
    assert not math.isfinite(log["grad_norm"]) and log["param_delta_norm"] == 0.0
    backward(learner, model)
    log = learner.step()
    assert log["param_delta_norm"] > 0 and "skipped_nonfinite" not in log and not same(before, state(learner))


def test_five_optimizer_steps_in_a_row_without_a_finite_gradient_stop_the_run():
    """D9: a finite one in between starts the count anew."""
    model = net()
    learner = learner_of(model)
    for scale in [math.nan] * 4 + [1.0] + [math.nan] * 4:
        backward(learner, model, scale=scale)
        learner.step()
    backward(learner, model, scale=math.nan)
    with pytest.raises(
        RuntimeError, match=r"^5 optimizer steps in a row without a finite gradient, the last time in 0\.weight\.$"
    ):
        learner.step()


def test_a_bad_first_gradient_leaves_no_moments_behind():
    model = net()
    learner = learner_of(model)
    backward(learner, model, scale=math.nan)
    learner.step()
    assert not learner.optimizer.state and learner.skipped == 1 and learner.updates == 1


def test_the_norm_that_is_logged_is_the_one_before_clipping():
    model = net()
    learner = learner_of(model, max_grad_norm=1e-3)
    backward(learner, model, scale=50.0)
    whole = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    assert learner.step()["grad_norm"] == pytest.approx(whole, rel=1e-6) and whole > 1


def test_a_step_is_adamw_on_the_clipped_gradient():
    ours, theirs = net(), net()
    learner = learner_of(ours, max_grad_norm=0.5, betas=(0.9, 0.99), weight_decay=0.01)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.01)
    for _ in range(3):
        backward(learner, ours)
        learner.step()
        theirs(torch.ones(4, 2)).square().mean().backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_the_size_of_the_step_is_logged():
    """C24: how far the weights went, since the loss says nothing."""
    model = net()
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    learner = learner_of(model)
    backward(learner, model)
    log = learner.step()
    moved = (nn.utils.parameters_to_vector(model.parameters()) - before).norm().item()
    assert log["param_delta_norm"] == pytest.approx(moved, rel=1e-5) and moved > 0
    assert type(log["param_delta_norm"]) is float


def test_gradients_of_several_backward_passes_add_up_and_are_cleared_after_the_step():
    model = net()
    learner = learner_of(model)
    backward(learner, model)
    once = model[0].weight.grad.clone()
    backward(learner, model)
    torch.testing.assert_close(model[0].weight.grad, 2 * once)
    learner.step()
    assert all(p.grad is None for p in model.parameters())


def test_a_gradient_left_over_from_before_is_not_part_of_the_first_update():
    """Pretraining leaves its last gradient on the parameters."""
    model = net()
    model(torch.ones(4, 2)).square().mean().backward()
    log = learner_of(model).step()
    assert log["grad_norm"] == 0.0


def test_gradients_are_reduced_before_anything_looks_at_them():
    """Ranks hand in their share; the sum is clipped and stepped on."""
    model = net()

    def doubled(gradients):
        for gradient in gradients:
            gradient.mul_(2)

    seen = []
    for reduce in (lambda gradients: None, doubled):
        learner = learner_of(model, reduce=reduce)
        backward(learner, model)
        model_state = {name: x.clone() for name, x in model.state_dict().items()}
        seen.append(learner.step()["grad_norm"])
        model.load_state_dict(model_state)
    assert seen[1] == pytest.approx(2 * seen[0], rel=1e-6)


def test_a_rank_without_rows_takes_part_in_the_reduction():
    """Every rank must bring the same list; that another one's rows reach all parameters is enough."""
    model = net()
    counted, others = [], torch.ones(1, 4, dtype=torch.bool)
    learner = learner_of(
        model,
        reduce=lambda gradients: counted.append([g.shape for g in gradients]),
        gather=lambda rows: torch.cat([rows, others]),
    )
    assert learner.step()["grad_norm"] == 0.0
    assert counted == [[p.shape for p in model.parameters()]]


def test_parameters_that_the_first_rows_do_not_reach_are_named():
    """C95: after an update without any rows still, and before a weight has moved."""
    model = net()
    learner = learner_of(model)
    learner.step()
    before = [p.detach().clone() for p in model.parameters()]
    learner.backward(model[1](torch.ones(4, 3)).mean())
    with pytest.raises(RuntimeError) as caught:
        learner.step()
    assert str(caught.value).startswith("2 of 4 trainable tensors got no gradient: 0.weight, 0.bias. ")
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("elsewhere", "missing"), [([True, True, False, False], ""), ([True, False, False, False], "0.bias")]
)
def test_a_parameter_is_missed_only_where_no_rank_reaches_it(elsewhere, missing):
    """C95: the rows of this rank reach the second layer alone."""
    model = net()
    learner = learner_of(model, gather=lambda rows: torch.cat([rows, torch.tensor([elsewhere])]))
    learner.backward(model[1](torch.ones(4, 3)).mean())
    if not missing:
        assert learner.step()["grad_norm"] > 0
        return
    with pytest.raises(RuntimeError, match=f"1 of 4 trainable tensors got no gradient: {missing}"):
        learner.step()


def test_a_gradient_of_zeros_is_one_and_later_updates_may_lack_rows():
    """The A of an adapter starts with zeros, because its B is 0."""
    model = net()
    model[1].weight.data.zero_()
    learner = learner_of(model)
    backward(learner, model)
    assert not model[0].weight.grad.any()
    learner.step()
    learner.backward(model[1](torch.ones(4, 3)).mean())
    assert learner.step()["grad_norm"] > 0


def test_the_rate_comes_from_the_number_of_the_iteration():
    """All optimizer updates of one rollout have the same."""
    model = net()
    learner = Learner(list(model.named_parameters()), lambda update: 0.1 * (update + 1), micro_batch=1)
    rates = []
    for iteration in range(3):
        learner.begin(iteration)
        for _ in range(2):
            backward(learner, model)
            rates.append(learner.step()["learning_rate"])
    assert (
        rates == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.3, 0.3]) and learner.optimizer.param_groups[0]["lr"] == rates[-1]
    )


def test_the_schedules_warm_up_and_then_stay_or_fall():
    def rates(schedule):
        return [learning_rate(u, rate=1.0, schedule=schedule, warmup=3, updates=13) for u in range(14)]

    constant, linear, cosine = (rates(name) for name in ("constant", "linear", "cosine"))
    assert constant[:4] == linear[:4] == [0.25, 0.5, 0.75, 1.0] and cosine[:4] == pytest.approx(linear[:4])
    assert set(constant[3:]) == {1.0} and linear[8] == pytest.approx(0.5) and cosine[8] == pytest.approx(0.5)
    assert linear[13] == pytest.approx(0) and cosine[13] == pytest.approx(0) and min(linear[:13]) > 0
    assert all(a >= b for a, b in pairwise(cosine[3:]))


def test_what_a_learner_holds_is_put_back_by_the_name_of_each_parameter():
    """The step that follows is the same, bit by bit; a parameter without a state yet has none afterwards."""
    one, other = net(), net()
    learner, fresh = learner_of(one), learner_of(other)
    assert learner.state() == {}
    for _ in range(2):
        backward(learner, one)
        learner.step()
    backward(learner, one, scale=math.nan)
    learner.step()
    assert set(learner.state()) == {"step", "exp_avg", "exp_avg_sq"}
    assert set(learner.state()["exp_avg"]) == set(learner.names)
    saved = {q: {name: x.clone() for name, x in values.items()} for q, values in learner.state().items()}
    other.load_state_dict(one.state_dict())
    fresh.restore(saved, learner.counters())
    assert same(state(learner), state(fresh))
    assert fresh.counters() == {"updates": 1, "skipped": 1, "in_a_row": 1}
    for scale in (1.0, 1.0):
        backward(learner, one, scale)
        backward(fresh, other, scale)
        assert learner.step() == fresh.step() and same(state(learner), state(fresh))
