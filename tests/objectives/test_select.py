"""flowrl/objectives/select.py: which decisions are trained."""

import pytest
import torch

from flowrl.objectives import select
from flowrl.randomness import generator
from samplers import tree_layout


def test_drawn_keeps_every_decision_that_was_drawn():
    noisy = torch.tensor([[1.0, 0, 1], [0, 0, 1]])
    assert torch.equal(select.drawn(noisy), noisy)


@pytest.mark.parametrize("steps, fraction, kept", [(15, 0.6, 9), (9, 0.6, 5), (5, 0.6, 3), (3, 0.1, 1), (4, 1.0, 4)])
def test_random_steps_keeps_the_whole_part_of_the_fraction_and_at_least_one(steps, fraction, kept):
    """int(0.6 (T - 1)) of the published runs."""
    noisy = torch.ones(40, steps + 1)
    noisy[:, -1] = 0
    mask = select.random_steps(noisy, generator(0), fraction=fraction)
    assert bool((mask.sum(1) == kept).all()) and bool((mask <= noisy).all())


def test_random_steps_draws_for_each_rollout_and_reaches_every_step():
    noisy = torch.ones(60, 6)
    mask = select.random_steps(noisy, generator(0), fraction=0.5)
    assert len(mask.unique(dim=0)) > 5 and bool((mask.sum(0) > 10).all())


def test_random_steps_is_a_function_of_its_generators_name():
    noisy = torch.ones(5, 8)
    one, other = (select.random_steps(noisy, generator(3, 1, "select")) for _ in range(2))
    assert torch.equal(one, other) and not torch.equal(one, select.random_steps(noisy, generator(3, 2, "select")))


def test_random_steps_keeps_nothing_of_a_rollout_that_drew_nothing():
    assert not select.random_steps(torch.zeros(3, 4), generator(0)).any()


def test_kept_leaves_out_the_rollouts_that_earned_nothing():
    noisy = torch.tensor([[1.0, 0, 1], [1, 1, 0], [1, 1, 1]])
    ours = select.kept(noisy, torch.tensor([0.5, 0.0, -0.1]))
    assert ours.tolist() == [[1, 0, 1], [0, 0, 0], [1, 1, 1]]


CHUNK = torch.tensor([0] * 2 + [1] * 3 + [2] * 4 + [3] * 7 + [-1])


@pytest.mark.parametrize(("fraction", "count"), [(0.5, 2), (0.3, 1), (0.1, 1), (0.75, 3), (1.0, 4)])
def test_whole_chunks_are_drawn_for_each_rollout(fraction, count):
    noisy = torch.ones(50, 17)
    noisy[:, -1] = 0
    change = torch.rand(50, 17, generator=torch.Generator().manual_seed(0)) + 0.1
    uniform = select.random_chunks(noisy, CHUNK, generator(0), fraction=fraction)
    weighted = select.weighted_chunks(noisy, CHUNK, change, generator(0), fraction=fraction)
    for mask in (uniform, weighted):
        chosen = torch.stack([mask[:, number == CHUNK].mean(1) for number in range(4)], 1)
        assert bool(((chosen == 0) | (chosen == 1)).all()) and bool((chosen.sum(1) == count).all())
        assert not mask[:, -1].any() and (count == 4 or len(chosen.unique(dim=0)) > 1)


def test_a_chunk_in_which_more_changes_is_drawn_more_often():
    """Without replacement: two of four chunks that change by 4, 1, 1, 2 a step; the first comes first with 1/2."""
    noisy, change = torch.ones(20_000, 17), torch.tensor([4.0, 1, 1, 2])[CHUNK.clamp(min=0)].expand(20_000, 17)
    first, both = (
        select.weighted_chunks(noisy, CHUNK, change, generator(0), fraction=f)[:, [0, 2, 5, 9]].mean(0)
        for f in (0.25, 0.5)
    )
    assert first.tolist() == pytest.approx([0.5, 0.125, 0.125, 0.25], abs=0.015)
    share = torch.tensor([4.0, 1, 1, 2]) / 8
    then = [sum(share[j] * share[i] / (1 - share[j]) for j in range(4) if j != i) + share[i] for i in range(4)]
    assert both.tolist() == pytest.approx([float(x) for x in then], abs=0.015)


LAYOUT = tree_layout(1, 20, range(19), {0: 2, 3: 2, 6: 2, 9: 2})
EDGE, GROUP, EVERY = LAYOUT.edge, torch.zeros(16, dtype=torch.long), torch.ones(16, 20)
REWARD = torch.randn(16, generator=torch.Generator().manual_seed(1))


def trained(mask):
    """Distinct transitions."""
    return len(EDGE[mask > 0].unique())


def test_branch_grpo_trains_218_transitions_or_138_when_it_is_pruned():
    assert trained(EVERY) == 218
    assert [len(EDGE[:, t].unique()) for t in range(20)] == [2] * 3 + [4] * 3 + [8] * 3 + [16] * 11
    assert trained(select.depth_pruned(EVERY, 0, first=16, count=5)) == 138
    assert trained(select.parent_top(EVERY, EDGE, GROUP, REWARD)) == 138
    assert trained(select.extremes(EVERY, EDGE, GROUP, REWARD)) == 138


def test_the_pruned_depths_slide_towards_the_noise_and_stop_at_the_last_split():
    """Depths 15-18 are reached by steps 14-17; after 30 iterations 14-17; never above depth 9."""
    for iteration, depth in ((0, 15), (29, 15), (30, 14), (59, 14), (60, 13), (180, 9), (9999, 9)):
        mask = select.depth_pruned(EVERY, iteration)
        assert (mask[0] == 0).nonzero().flatten().tolist() == [depth - 1 + i for i in range(4)]
        assert bool((mask == mask[:1]).all())
    fixed = select.depth_pruned(EVERY, 500, stop=15)
    assert torch.equal(fixed, select.depth_pruned(EVERY, 0))


def test_the_better_half_of_each_last_split_goes_on():
    mask = select.parent_top(EVERY, EDGE, GROUP, REWARD)
    assert bool((mask[:, :10] == 1).all())
    kept = mask[:, 10:].mean(1).view(8, 2)
    assert torch.equal(kept.argmax(1), REWARD.view(8, 2).argmax(1)) and bool((kept.sum(1) == 1).all())


def test_the_best_and_the_worst_quarter_go_on():
    mask = select.extremes(EVERY, EDGE, GROUP, REWARD)
    order = REWARD.argsort().tolist()
    kept = mask[:, 10:].all(1).nonzero().flatten().tolist()
    assert sorted(kept) == sorted(order[:4] + order[-4:]) and bool((mask[:, :10] == 1).all())


def test_trees_of_two_prompts_are_pruned_each_by_itself():
    edge = torch.cat([EDGE, EDGE + 1000])
    group, reward = torch.arange(2).repeat_interleave(16), torch.cat([REWARD, REWARD + 50])
    for rule in (select.parent_top, select.extremes):
        mask = rule(torch.ones(32, 20), edge, group, reward)
        assert torch.equal(mask[:16], mask[16:]) and torch.equal(mask[:16], rule(EVERY, EDGE, GROUP, REWARD))


def test_pruning_leaves_a_lone_leaf_of_a_split_alone():
    """Its sibling's score failed; and only what was drawn is trained."""
    kept = [n for n in range(16) if n != 3]
    noisy = EVERY[kept].clone()
    noisy[:, -1] = 0
    mask = select.parent_top(noisy, EDGE[kept], GROUP[kept], REWARD[kept])
    assert bool((mask <= noisy).all()) and bool(mask[2, 10:19].all())


def test_a_jump_over_steps_is_no_split():
    """Merged steps leave gaps in the table: the split at step 3 is still the last one, and step 4 comes after it."""
    edge = torch.tensor([[0, -1, 1, 2, 4], [0, -1, 1, 3, 5]])
    mask = select.parent_top(torch.ones(2, 5), edge, torch.zeros(2, dtype=torch.long), torch.tensor([1.0, 0.0]))
    assert mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
