"""Where the time goes."""

import pytest

from flowrl.run import profile
from flowrl.run.profile import Clock


@pytest.fixture
def now(monkeypatch):
    """A clock that is moved by hand."""
    time = {"now": 0.0}
    monkeypatch.setattr(profile, "_now", lambda: time["now"])
    return time


class Owner:
    def __init__(self, now):
        self.time = now

    def slow(self, seconds):
        self.time["now"] += seconds
        return seconds

    def around(self, seconds):
        self.time["now"] += 1
        return self.slow(seconds)


def test_shares_are_what_was_spent_and_the_rest(now):
    clock, owner = Clock(), Owner(now)
    clock.watch(owner, "slow", "network")
    assert owner.slow(3.0) == 3.0 and owner.slow(1.0) == 1.0
    assert clock.timed("reward", owner.time.get)("now") == 4.0
    assert clock.shares(8.0) == {"network": 0.5, "reward": 0.0, "other": 0.5}
    assert clock.shares(8.0) == {"other": 1.0}  # starts anew


def test_a_part_inside_another_counts_once_for_the_outer(now):
    clock, owner = Clock(), Owner(now)
    clock.watch(owner, "slow", "inner")
    clock.watch(owner, "around", "outer")
    owner.around(3.0)
    assert clock.shares(4.0) == {"outer": 1.0, "other": 0.0}


def test_a_part_that_fails_is_counted_and_the_clock_goes_on(now):
    clock = Clock()

    def fails():
        now["now"] += 2
        raise RuntimeError

    with pytest.raises(RuntimeError):
        clock.timed("reward", fails)()
    clock.timed("network", lambda: now.update(now=4.0))()
    assert clock.shares(4.0) == {"reward": 0.5, "network": 0.5, "other": 0.0}
