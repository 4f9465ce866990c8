"""flowrl/advantages/tree.py: which decisions earned it."""

from math import exp, prod
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
    layout = tree_layout(roots, len(forks) + 1, range(len(forks)), dict(enumerate(forks)))
    group = torch.zeros(len(kept), dtype=torch.long) if one_group else layout.leaf_root[kept]
    return layout.edge[kept, :-1], group, torch.tensor(values, dtype=torch.float64)[kept] / 4


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
def test_leaves_may_be_added_up_in_the_place_of_their_mean(case):
    """E-GRPO's granularities: where every edge has one leaf that is the leaf's own advantage, bit by bit."""
    edge, _, advantage = build(case)
    ours = tree.leaf_sum(advantage, edge)
    torch.testing.assert_close(ours, tree.tree_value(advantage, edge) * tree.edge_share(edge))
    for t in range(edge.shape[1]):
        for e in edge[:, t].unique():
            below = edge[:, t] == e
            assert ours[below, t].tolist() == pytest.approx([float(advantage[below].sum())] * int(below.sum()))
    alone = torch.arange(len(advantage))[:, None]
    assert torch.equal(tree.leaf_sum(advantage, alone), tree.broadcast(advantage, alone))


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


def log_probs(edge, scale=1.0):
    """A log-prob per distinct edge, by its id; every fifth edge was determined and has none."""
    each = scale * torch.randn(int(edge.max()) + 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    each[::5] = torch.nan
    return torch.where(edge >= 0, each[edge], torch.nan)


def naive_backup(advantage, edge, log_prob, temperature, t):
    """{edge: value} at step t by recursion over the distinct children of an edge, in plain Python."""
    if t == edge.shape[1] - 1:
        return naive_values(advantage, edge, t)[0]
    below, children = naive_backup(advantage, edge, log_prob, temperature, t + 1), {}
    for n, e in enumerate(edge[:, t].tolist()):
        score = float(log_prob[n, t + 1].nan_to_num())
        children.setdefault(e, {})[int(edge[n, t + 1])] = exp(score / temperature)
    return {e: sum(w * below[c] for c, w in ws.items()) / sum(ws.values()) for e, ws in children.items()}


@given(case=ragged_trees(), temperature=st.sampled_from([0.3, 1.0, 4.0]))
def test_values_backed_up_edge_by_edge_are_what_a_recursion_gives(case, temperature):
    edge, _, advantage = build(case)
    ours = tree.edge_softmax(advantage, edge, log_probs(edge), temperature=temperature)
    for t in range(edge.shape[1]):
        expected = naive_backup(advantage, edge, log_probs(edge), temperature, t)
        assert ours[:, t].tolist() == pytest.approx([expected[e] for e in edge[:, t].tolist()], abs=1e-9)


@given(case=ragged_trees(), beta=st.sampled_from([0.5, 1.0, 3.0]))
def test_leaves_are_weighed_by_the_log_prob_of_the_path_to_them(case, beta):
    edge, _, advantage = build(case)
    log_prob = log_probs(edge).nan_to_num()
    ours = tree.path_softmax(advantage, edge, log_probs(edge), beta=beta)
    for t in range(edge.shape[1]):
        for n in range(len(edge)):
            below = [m for m in range(len(edge)) if edge[m, t] == edge[n, t]]
            weight = [exp(beta * float(log_prob[m, t + 1 :].sum())) for m in below]
            expected = sum(w * float(advantage[m]) for w, m in zip(weight, below, strict=True)) / sum(weight)
            assert ours[n, t].item() == pytest.approx(expected, abs=1e-9)


@given(case=ragged_trees())
def test_flat_softmaxes_are_the_mean(case):
    """beta 0 weighs leaves the same; equal log-probs weigh children the same."""
    edge, group, advantage = build(case)
    none = torch.zeros(edge.shape, dtype=torch.float64)
    torch.testing.assert_close(
        tree.path_softmax(advantage, edge, log_probs(edge), beta=0.0), tree.tree_value(advantage, edge)
    )
    by_edge, by_path = (f(advantage, edge, group, none) for f in BY_LOG_PROB)
    torch.testing.assert_close(by_path, tree.tree_depthwise(advantage, edge, group), atol=1e-9, rtol=0)
    for t in range(edge.shape[1] - 1):
        value = tree.edge_softmax(advantage, edge, none)
        for e in edge[:, t].unique():
            rows = edge[:, t] == e
            child = {int(c): float(v) for c, v in zip(edge[rows, t + 1], value[rows, t + 1], strict=True)}
            assert float(value[rows, t][0]) == pytest.approx(mean(child.values()), abs=1e-9)
    assert by_edge.shape == edge.shape


BY_LOG_PROB = (tree.tree_depthwise_by_edge, tree.tree_depthwise_by_path)


@pytest.mark.parametrize("credit", BY_LOG_PROB, ids=lambda f: f.__name__)
@given(case=ragged_trees(), value=st.floats(-100, 100, width=32))
def test_weighed_credit_sums_to_0_at_a_depth_and_is_0_for_equal_leaves(credit, case, value):
    edge, group, advantage = build(case)
    ours = credit(advantage, edge, group, log_probs(edge), clamp=1e9)
    for t in range(edge.shape[1]):
        for g in group.unique():
            once = {int(e): float(a) for e, a, h in zip(edge[:, t], ours[:, t], group, strict=True) if h == g}
            assert sum(once.values()) == pytest.approx(0, abs=1e-5)
    equal = torch.full((len(advantage),), value, dtype=torch.float64)
    assert not credit(equal, edge, group, log_probs(edge)).any()


def test_sharp_log_probs_follow_the_likeliest_child_and_do_not_overflow():
    edge = torch.tensor([[0, 1], [0, 2], [0, 3]])
    log_prob = torch.tensor([[0.0, 500.0], [0.0, -800.0], [0.0, 499.0]])
    advantage = torch.tensor([2.0, 5.0, -1.0])
    by_edge, by_path = tree.edge_softmax(advantage, edge, log_prob), tree.path_softmax(advantage, edge, log_prob)
    likelier = 1 / (1 + exp(-1))
    for ours in (by_edge, by_path):
        assert ours[:, 0].tolist() == pytest.approx([3 * likelier - 1] * 3)
        assert torch.equal(ours[:, 1], advantage)


def test_one_child_everywhere_earns_the_leafs_advantage():
    """TreeGRPO with b = 1."""
    edge = torch.arange(12).view(3, 4)
    advantage = torch.tensor([2.0, -1.0, 0.5])
    assert torch.equal(tree.edge_softmax(advantage, edge, torch.rand(3, 4)), tree.broadcast(advantage, edge))


def test_levels_sum_to_0_under_a_flat_back_up_of_centred_leaves():
    """TreeGRPO, b = w = 3: all nodes of a level have as many leaves."""
    edge = tree_layout(1, 5, (1, 2, 3), {1: 3, 2: 3, 3: 3}).edge
    advantage = torch.randn(27, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    value = tree.edge_softmax(advantage - advantage.mean(), edge, torch.zeros(27, 5, dtype=torch.float64))
    torch.testing.assert_close(value.sum(0), torch.zeros(5, dtype=torch.float64), atol=1e-9, rtol=0)


def test_a_step_that_a_jump_leaves_out_neither_earns_nor_cuts_the_path():
    """Merged steps: two leaves share edge 0, jump over step 1, and part at step 2."""
    edge = torch.tensor([[0, -1, 1], [0, -1, 2]])
    log_prob = torch.tensor([[0.0, torch.nan, 1.0], [0.0, torch.nan, 0.0]])
    for fusion in (tree.edge_softmax, tree.path_softmax):
        ours = fusion(torch.tensor([1.0, 0.0]), edge, log_prob)
        assert ours[:, 0].tolist() == pytest.approx([exp(1) / (exp(1) + 1)] * 2)
        assert ours[:, 1:].tolist() == [[0, 1], [0, 0]]
