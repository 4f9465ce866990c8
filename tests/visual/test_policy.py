"""flowrl/visual/policy.py: snapshots of the trainable weights."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from flowrl import decays
from flowrl.part import part
from flowrl.recipe import Snapshot, copied, frozen
from flowrl.visual.policy import Policy, Snapshots


def weights(*values):
    return [nn.Parameter(torch.tensor([float(v)])) for v in values]


def set_to(parameters, *values):
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data.fill_(value)


def read(parameters):
    return [p.item() for p in parameters]


def test_a_frozen_snapshot_stays_and_current_weights_come_back():
    live = weights(1, 2)
    kept = Snapshots(live)
    kept.refresh("ref", frozen(), 0)
    set_to(live, 5, 6)
    for update in range(1, 4):
        kept.refresh("ref", frozen(), update)
    with kept.at("ref"):
        assert read(live) == [1, 2]
    assert read(live) == [5, 6]
    with kept.at("current"):
        assert read(live) == [5, 6]


def test_weights_come_back_also_after_an_error():
    """C63: a reward that raises in the middle of an evaluation must not leave the snapshot in place."""
    live = weights(1)
    kept = Snapshots(live)
    kept.refresh("ema", Snapshot(part(decays.constant, share=0.9)), 0)
    set_to(live, 5)
    with pytest.raises(RuntimeError), kept.at("ema"):
        raise RuntimeError
    assert read(live) == [5]
    with kept.at("ema"):
        assert read(live) == [1]


def test_a_snapshot_follows_by_its_decay_every_so_many_updates():
    live = weights(0)
    kept = Snapshots(live)
    rule = Snapshot(part(decays.constant, share=0.75), every=2)
    kept.refresh("anchor", rule, 0)
    set_to(live, 8)
    followed = []
    for update in range(1, 5):
        kept.refresh("anchor", rule, update)
        with kept.at("anchor"):
            followed += read(live)
    assert followed == [0, 2, 2, 3.5]


def test_a_copy_of_decay_0_is_the_policy_of_the_last_refresh():
    live = weights(1)
    kept = Snapshots(live)
    kept.refresh("old", Snapshot(part(decays.constant, share=0.0)), 0)
    set_to(live, 3)
    kept.refresh("old", Snapshot(part(decays.constant, share=0.0)), 1)
    set_to(live, 9)
    with kept.at("old"):
        assert read(live) == [3]


def test_an_average_warms_up():
    """min(decay, (1 + n) / (10 + n)): early averages follow fast."""
    live = weights(0)
    kept = Snapshots(live)
    rule = Snapshot(part(decays.warming, share=0.9))
    kept.refresh("ema", rule, 0)
    set_to(live, 11)
    kept.refresh("ema", rule, 1)
    with kept.at("ema"):
        assert read(live) == pytest.approx([9])


def test_a_frozen_snapshot_of_adapters_is_the_base_without_them():
    """Nothing is copied: the adapters are switched off."""
    live, switched = weights(1), []

    @contextmanager
    def base():
        switched.append("off")
        yield
        switched.append("on")

    kept = Snapshots(live, base)
    kept.refresh("ref", frozen(), 0)
    set_to(live, 4)
    with kept.at("ref"):
        assert switched == ["off"] and read(live) == [4]
    kept.refresh("ref", frozen(), 1)
    kept.refresh("ema", Snapshot(part(decays.constant, share=0.5)), 0)
    with kept.at("ema"):
        assert read(live) == [4]
    assert switched == ["off", "on"]


def test_parameters_stay_the_same_objects_so_that_the_optimiser_goes_on():
    live = weights(1)
    optimizer = torch.optim.SGD(live, 1.0)
    kept = Snapshots(live)
    kept.refresh("ref", frozen(), 0)
    with kept.at("ref"):
        pass
    live[0].grad = torch.tensor([1.0])
    optimizer.step()
    assert read(live) == [0]
    with kept.at("ref"):
        assert read(live) == [1]


def test_a_name_is_known_once_it_was_taken():
    kept = Snapshots(weights(1))
    assert "ref" not in kept
    kept.refresh("ref", frozen(), 0)
    assert "ref" in kept


def test_the_toy_fits_the_protocol(toy):
    assert isinstance(toy(), Policy)


def test_what_snapshots_hold_is_put_back_into_others():
    """A reference that is the base model under its adapters holds nothing."""

    @contextmanager
    def base():
        yield

    made = []
    for _ in range(2):
        live = weights(1, 2)
        kept = Snapshots(live, base)
        average = Snapshot(part(decays.constant, share=0.5))
        for name, rule in (("ref", frozen()), ("old", copied()), ("ema", average)):
            kept.refresh(name, rule, 0)
        made.append((live, kept))
    (live, kept), (other, fresh) = made
    set_to(live, 5, 6)
    kept.refresh("old", Snapshot(part(decays.constant, share=0.0)), 1)
    kept.refresh("ema", Snapshot(part(decays.constant, share=0.5)), 1)
    assert {name: [x.item() for x in xs] for name, xs in kept.state().items()} == {"old": [5, 6], "ema": [3, 4]}
    fresh.restore(kept.state())
    for name, values in (("old", [5, 6]), ("ema", [3, 4]), ("current", [1, 2])):
        with fresh.at(name):
            assert read(other) == values
    set_to(live, 9, 9)
    kept.refresh("old", Snapshot(part(decays.constant, share=0.0)), 2)
    with fresh.at("old"):
        assert read(other) == [5, 6]  # copied, not shared
    with pytest.raises(AssertionError, match="snapshots"):
        fresh.restore({"old": kept.state()["old"]})
