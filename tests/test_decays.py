"""flowrl/decays.py: how snapshots follow."""

import pytest

from flowrl import decays
from flowrl.part import part
from flowrl.recipe import Snapshot, copied, frozen


@pytest.mark.parametrize(
    ("numbers", "refresh", "share"),
    [
        ({"slope": 0.001, "most": 0.5}, 100, 0.1),
        ({"slope": 0.001, "most": 0.5}, 800, 0.5),
        ({"after": 75, "slope": 0.0075, "most": 0.999}, 75, 0),
        ({"after": 75, "slope": 0.0075, "most": 0.999}, 100, 0.1875),
        ({"after": 75, "slope": 0.0075, "most": 0.999}, 300, 0.999),
        ({"start": 0.25, "slope": 0.005, "most": 0.999}, 10, 0.3),
    ],
)
def test_the_golden_decays_of_an_old_policy(numbers, refresh, share):
    """DiffusionNFT's types 1 and 2, and CRD's."""
    assert decays.linear(refresh, **numbers) == pytest.approx(share)


def test_an_average_warms_up():
    assert decays.warming(1, share=0.9) == pytest.approx(2 / 11) and decays.warming(1000, share=0.9) == 0.9


def test_a_rule_counts_its_refreshes():
    """Every third update; its decay sees 1, 2, ...; in between it stays as it is."""
    rule = Snapshot(part(decays.linear, slope=0.1, most=0.9), every=3)
    assert [rule.share_kept(u) for u in range(1, 8)] == pytest.approx([1, 1, 0.1, 1, 1, 0.2, 1])
    assert frozen().share_kept(5) == 1 and copied().share_kept(5) == 0
