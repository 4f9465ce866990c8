"""flowrl/visual/ranks.py: keeping step with other ranks; real ones run in tests/run/test_equal_ranks.py."""

import pytest
import torch

from flowrl.visual.ranks import Ranks, in_step


@pytest.mark.parametrize("batch_size, sizes", [(3, [3] * 4 + [1] * 6), (20, [12, 1]), (100, [12])])
def test_a_rank_calls_the_network_as_often_as_the_one_with_most_roots(toy, batch_size, sizes):
    """Two roots here, five there, six states of each: 12 rows here where the other rank has 30."""
    policy, seen = toy(), []
    velocity = policy.velocity
    policy.velocity = lambda *rows: seen.append(len(rows[0])) or velocity(*rows)
    rows = torch.randn(12, 2), torch.full((12,), 0.5), torch.zeros(12, dtype=torch.long)
    found = in_step(policy, Ranks(agree=lambda count: 5), 2, batch_size)(*rows)
    assert seen == sizes and policy.forwards == 12
    torch.testing.assert_close(found, velocity(*rows))


def test_alone_nothing_is_called_twice(toy):
    policy = toy()
    rows = torch.randn(12, 2), torch.full((12,), 0.5), torch.zeros(12, dtype=torch.long)
    in_step(policy, Ranks(), 2, 5)(*rows)
    assert policy.forwards == 12
