"""flowrl/advantages/tree.py: which decisions earned it."""

from math import prod
from statistics import mean, stdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.advantages import tree
from samplers import tree_layout


@st.composite
def ragged_trees(draw):
    """What `build` needs for trees of any shape, with some leaves missing and the rows in any order."""
    roots, forks = draw(st.integers(1, 3)), draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    leaves = roots * prod(forks)
    kept = draw(st.permutations(range(leaves)))[: draw(st.integers(1, leaves))]
    return roots, forks, kept, draw(st.lists(st.integers(-8, 8), min_size=leaves, max_size=leaves)), draw(st.booleans())


def build(case):
    """(edge [N, T], group [N], advantage [N])."""
    roots, forks, kept, values, one_group = case
    layout = tree_layout(roots, len(forks), dict(enumerate(forks)))
    group = torch.zeros(len(kept), dtype=torch.long) if one_group else layout.leaf_root[kept]
    return layout.edge[kept], group, torch.tensor(values, dtype=torch.float64)[kept] / 4


def naive_values(advantage, edge, t):
    """{edge: mean of the leaves below it} at step t, in plain Python."""
    below = {}
    for e, a in zip(edge[:, t].tolist(), advantage.tolist(), strict=True):
        below.setdefault(e, []).append(a)
    return {e: mean(values) for e, values in below.items()}, {e: len(values) for e, values in below.items()}


@given(case=ragged_trees())
def test_an_edge_is_worth_the_mean_of_the_leaves_below_it(case):
    edge, _, advantage = build(case)
    ours, share = tree.tree_value(advantage, edge), tree.edge_share(edge)
    for t in range(edge.shape[1]):
        value, leaves = naive_values(advantage, edge, t)
        assert ours[:, t].tolist() == pytest.approx([value[e] for e in edge[:, t].tolist()])
        assert share[:, t].tolist() == [leaves[e] for e in edge[:, t].tolist()]


@given(case=ragged_trees())
def test_depthwise_credit_is_what_a_walk_over_the_nodes_gives(case):
    edge, group, advantage = build(case)
    ours = tree.tree_depthwise(advantage, edge, group)
    for t in range(edge.shape[1]):
        value, _ = naive_values(advantage, edge, t)
        for g in set(group.tolist()):
            rows = (group == g).nonzero().flatten()
            peers = [value[e] for e in set(edge[rows, t].tolist())]
            std = stdev(peers) if len(peers) > 1 else 0.0
            for n in rows.tolist():
                expected = (value[int(edge[n, t])] - mean(peers)) / (std + 1e-8) if std >= 1e-6 else 0.0
                assert ours[n, t].item() == pytest.approx(max(-5, min(5, expected)), abs=1e-5)


@given(case=ragged_trees())
def test_depthwise_credit_sums_to_0_over_the_edges_of_a_depth(case):
    edge, group, advantage = build(case)
    ours = tree.tree_depthwise(advantage, edge, group, clamp=1e9)
    for t in range(edge.shape[1]):
        for value in group.unique():
            once = {int(e): float(a) for e, a, g in zip(edge[:, t], ours[:, t], group, strict=True) if g == value}
            assert sum(once.values()) == pytest.approx(0, abs=1e-5)


@given(value=st.floats(-100, 100, width=32), case=ragged_trees())
def test_equal_leaves_earn_exactly_0_everywhere(value, case):
    """C01, C52: also where edges have one, two and three leaves, whose means round differently."""
    edge, group, advantage = build(case)
    ours = tree.tree_depthwise(torch.full((len(advantage),), value), edge, group)
    assert not ours.any()


def test_equal_rewards_around_28_earn_exactly_0_where_a_leaf_is_missing():
    """The mean of three rounds by 2e-6 there, more than `min_spread`: unguarded, one edge would earn -0.99."""
    edge = torch.tensor([[0, 2], [0, 3], [0, 4], [1, 5], [1, 6]])
    ours = tree.tree_depthwise(torch.full((5,), 28.050914764404297), edge, torch.zeros(5, dtype=torch.long))
    assert not ours.any()


def test_a_depth_with_one_edge_earns_0_and_the_next_does_not():
    """C52: tree [1, 4]; and a tree whose subtree means are equal."""
    zero = torch.zeros(4, dtype=torch.long)
    ours = tree.tree_depthwise(torch.tensor([0.0, 1, 3, 5]), torch.tensor([[0, 1], [0, 2], [0, 3], [0, 4]]), zero)
    assert not ours[:, 0].any() and bool(ours[:, 1].all())
    ours = tree.tree_depthwise(torch.tensor([0.0, 3, 1, 2]), torch.tensor([[0, 2], [0, 3], [1, 4], [1, 5]]), zero)
    assert not ours[:, 0].any() and bool(ours[:, 1].all())


def test_trees_of_two_prompts_are_not_compared():
    edge = torch.tensor([[0, 4], [1, 5], [2, 6], [3, 7]])
    one = tree.tree_depthwise(torch.tensor([0.0, 1, 50, 90]), edge, torch.tensor([9, 9, 4, 4]))
    other = tree.tree_depthwise(torch.tensor([0.0, 1, -7, -8]), edge, torch.tensor([9, 9, 4, 4]))
    assert torch.equal(one[:2], other[:2]) and not torch.equal(one[2:], other[2:])


def test_roots_of_one_group_are_compared():
    """Two roots of one prompt: their first edges are peers."""
    ours = tree.tree_depthwise(torch.tensor([0.0, 1]), torch.tensor([[0, 2], [1, 3]]), torch.tensor([0, 0]))
    assert bool((ours[0] < 0).all()) and bool((ours[1] > 0).all())


@pytest.mark.parametrize("credit", [tree.broadcast, tree.tree_value])
def test_a_decision_that_does_not_exist_gets_0(credit):
    edge = torch.tensor([[0, -1], [1, 2]])
    ours = credit(torch.tensor([3.0, 5.0]), edge)
    assert ours.tolist() == [[3, 0], [5, 5]]


def test_depthwise_credit_gives_missing_decisions_0_and_no_part_in_the_statistics():
    whole = tree.tree_depthwise(
        torch.tensor([3.0, 5, 9]), torch.tensor([[0], [1], [2]]), torch.zeros(3, dtype=torch.long)
    )
    edge = torch.tensor([[0], [1], [2], [-1], [-1]])
    ours = tree.tree_depthwise(torch.tensor([3.0, 5, 9, 100, -70]), edge, torch.zeros(5, dtype=torch.long))
    torch.testing.assert_close(ours[:3], whole)
    assert not ours[3:].any()


def test_depthwise_credit_is_clamped_last():
    rows = torch.arange(40)[:, None]
    outlier = torch.zeros(40)
    outlier[0] = 1
    ours = tree.tree_depthwise(outlier, rows, torch.zeros(40, dtype=torch.long), clamp=5.0)
    assert ours.max() == 5
