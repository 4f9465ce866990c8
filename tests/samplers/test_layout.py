"""samplers/layout.py: who follows whom, known before any network call."""

import pytest
import torch

from samplers.layout import depths, lengths, tree_layout


def follows(layout):
    """Whether every edge of a leaf leaves the state that the one before it reached, and the last one is its final."""
    roots = layout.frontier[0]
    for leaf, root, final in zip(layout.edge, layout.leaf_root, layout.final, strict=True):
        at, way = int(root), leaf[leaf >= 0].tolist()
        for e in way:
            assert int(layout.source[e]) == at and int(layout.root[e]) == int(root)
            at = roots + e
        assert at == int(final) and int(layout.step_next[way[-1]]) == layout.edge.shape[1]
    return True


def test_the_layout_knows_all_sizes_before_any_network_call():
    layout = tree_layout(3, 4, (1,), {1: 2})
    assert layout.frontier == (3, 3, 6, 6, 6) and layout.edge.shape == (6, 4) and follows(layout)
    assert layout.leaf_root.tolist() == [0, 0, 1, 1, 2, 2] and not layout.branch.any()
    assert bool((layout.root[layout.edge] == layout.leaf_root[:, None]).all())


def test_steps_apart_leave_one_path_and_never_meet_again():
    """Two roots, noise at steps 0, 2 and 3 of 6: every leaf has one drawn edge, and the path up to it is shared."""
    layout = tree_layout(2, 6, (0, 2, 3), {0: 2, 2: 3}, apart=True)
    assert len(layout.edge) == 2 * (2 + 3 + 1) and follows(layout)
    drawn = layout.noisy[layout.edge]
    assert drawn.sum(1).tolist() == [1] * 12
    assert drawn.int().argmax(1).tolist() == [0, 0, 2, 2, 2, 3] * 2
    assert layout.branch.tolist() == [0, 0, 1, 1, 1, 2] * 2 and layout.leaf_root.tolist() == [0] * 6 + [1] * 6
    path = layout.edge[5]  # of the last step that draws: it leaves the path last
    for leaf, step in zip(layout.edge[:6], (0, 0, 2, 2, 2, 3), strict=True):
        assert torch.equal(leaf[:step], path[:step])
    assert [len(layout.edge[:6, t].unique()) for t in range(6)] == [3, 3, 6, 6, 6, 6]
    assert layout.frontier == (2, 6, 6, 12, 12, 12, 12), "the path ends where it was last left"


def test_a_merged_jump_skips_levels():
    """From step 1 over two steps: nothing is at level 2, and no edge is taken there."""
    layout = tree_layout(1, 5, {1: 2}, {1: 3})
    assert layout.frontier == (1, 1, 0, 3, 3, 3) and follows(layout)
    assert (layout.edge[:, 2] == -1).all() and layout.step_next[layout.edge[0, 1]] == 3


def test_merged_jumps_apart_land_on_levels_that_others_cross():
    layout = tree_layout(2, 6, {0: 1, 1: 3}, {0: 2, 1: 2}, apart=True)
    assert follows(layout) and layout.frontier == (2, 6, 4, 4, 8, 8, 8)
    assert layout.level(4).tolist() == sorted(layout.level(4).tolist(), key=lambda s: (int(layout.noisy[s - 2]), s))


def test_a_jump_goes_on_once_for_every_stride():
    """From step 1 over two of 8 steps: on from level 3 by 4, 5, ... 8 and by 5, 7, 8; each is a set of its own."""
    layout = tree_layout(2, 8, {0: 1, 1: 2}, {0: 2, 1: 2}, apart=True, strides=(1, 2))
    assert follows(layout) and layout.branches == 4 and len(layout.edge) == 2 * 2 * 2 * 2
    assert layout.branch.tolist() == [0, 0, 1, 1, 2, 2, 3, 3] * 2 and layout.leaf_root.tolist() == [0] * 8 + [1] * 8
    levels = [[int(layout.step_next[e]) for e in path if e >= 0] for path in layout.edge[[0, 2, 4, 6]]]
    assert levels == [[*range(1, 9)], [1, 3, 5, 7, 8], [1, *range(3, 9)], [1, 3, 5, 7, 8]]
    jump = layout.edge[:, 1].view(2, 4, 2)[:, 2:]
    assert torch.equal(jump[:, 0], jump[:, 1]) and len(jump.unique()) == 4, "both ways begin with one jump"
    assert torch.equal(jump[:, 0].unique(), layout.noisy.nonzero()[:, 0][layout.step[layout.noisy] == 1])
    plain = tree_layout(2, 8, {0: 1, 1: 2}, {0: 2, 1: 2}, apart=True)
    assert layout.frontier[:3] == plain.frontier[:3] and plain.branches == 2


@pytest.mark.parametrize(
    ("strides", "apart", "said"),
    [
        ((1, 2), False, r"strides \[1, 2\]: only where noisy steps stand apart"),
        ((), True, r"strides \[\]: expected one or more, all different, each 1 or more"),
        ((2, 2), True, r"strides \[2, 2\]: expected one or more, all different"),
        ((0, 1), True, r"strides \[0, 1\]: expected one or more, all different, each 1 or more"),
        ((1, 4), True, "a stride of 4 from step 3 on, where the last jump lands, is past the end: 6 steps leave 3"),
    ],
)
def test_strides_that_lead_nowhere_else_are_refused(strides, apart, said):
    with pytest.raises(ValueError, match=said):
        tree_layout(1, 6, {0: 1, 1: 2} if apart else (0, 1), apart=apart, strides=strides)


def test_only_ends_of_drawn_edges_and_finals_are_kept():
    """Noise apart at step 2 of 6: the state before it, its children, and where they end."""
    layout = tree_layout(1, 6, (2,), {2: 4}, apart=True)
    assert int(layout.kept.sum()) == 1 + 4 + 4
    assert int(tree_layout(1, 6, range(5)).kept.sum()) == 7


def test_candidates_are_drawn_at_the_noisy_steps_whether_or_not_they_fork():
    """Two children at step 0 and none besides at step 1, of three steps that draw and one that does not."""
    layout = tree_layout(2, 4, (0, 1, 2), {0: 2}, chosen={0: torch.tensor([1, 0])})
    assert [move.noisy for move in layout.moves] == [True, True, True, False]
    assert layout.frontier == (2, 4, 2, 2, 2) and bool(layout.kept.all()) and len(layout.edge) == 2 * (1 + 1)


def test_depth_counts_the_drawn_edges_before_a_step():
    assert depths(6, (1, 3)).tolist() == [0, 0, 1, 1, 2, 2]
    assert not depths(6, (1, 3), apart=True).any()
    assert lengths((3, 1)) == {1: 1, 3: 1} and lengths({2: 3}) == {2: 3}


@pytest.mark.parametrize(
    ("noisy", "forks", "said"),
    [
        ((4,), {}, "step 4 of 5 has zero transition noise"),
        ({2: 3}, {}, "a jump from step 2 over 3 steps: it spans 1 or more, and ends at step 4 of 5 or before"),
        ({2: 0}, {}, "a jump from step 2 over 0 steps"),
        ({0: 2, 1: 1}, {}, "step 1 draws noise, but the jump from step 0 over 2 steps skips it"),
        ((0, 2), {1: 2}, r"a fork at step 1, which draws no noise, makes equal children; noisy steps: \[0, 2\]"),
        ((0,), {0: 0}, r"forks\[0\] = 0: a state has at least one child"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(noisy, forks, said):
    with pytest.raises(ValueError, match=said):
        tree_layout(1, 5, noisy, forks)


def test_apart_a_jump_may_cross_another_step_that_draws():
    layout = tree_layout(1, 5, {0: 2, 1: 1}, {0: 2, 1: 2}, apart=True)
    assert follows(layout) and layout.branch.tolist() == [0, 0, 1, 1]
    assert torch.equal(layout.edge[:2, 1], torch.tensor([-1, -1]))
