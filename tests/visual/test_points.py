"""flowrl/visual/points.py: the tables of an update as rows, each distinct transition once."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.objectives import weights
from flowrl.randomness import generator
from flowrl.visual.points import Drawn, on_chunks, on_noise, on_path
from flowrl.visual.ranks import is_spare
from samplers import kernels, rollout, schedules


def grow(roots=2, steps=5, forks=None, noisy=None):
    noisy = tuple(range(steps - 1)) if noisy is None else noisy
    return rollout(
        lambda latents, sigma, prompt: latents + prompt[:, None],
        torch.randn(roots, 3, generator=generator(0)),
        torch.arange(roots) + 5,
        schedules.linear(steps),
        kernels.dance_sde,
        noisy=noisy,
        forks=forks,
        generators=[generator(0, r) for r in range(roots)],
    )


def tables(tree, seed=0):
    """An advantage and a weight for every decision but those of the last step, some of them left out."""
    mask = (torch.rand(tree.edge.shape, generator=generator(seed)) < 0.7).float()
    mask[:, -1] = 0
    return torch.randn(tree.edge.shape, generator=generator(seed, "advantage")), weights.token_mean(mask)


def test_branch_grpo_trains_202_edges_in_187_calls():
    tree = grow(roots=1, steps=20, forks={0: 2, 3: 2, 6: 2, 9: 2})
    mask = torch.ones(tree.edge.shape)
    mask[:, -1] = 0
    points = on_path(tree, mask, weights.edge_mean(mask, tree.edge))
    assert len(points) == 202 and points.calls == 187


@given(seed=st.integers(0, 99), forks=st.dictionaries(st.integers(0, 3), st.integers(1, 3)))
def test_rows_keep_the_weight_and_the_weighted_advantage_of_the_table(seed, forks):
    """A shared transition gets the sum of its leaves' weights and by these the mean of their advantages."""
    tree = grow(forks=forks)
    advantage, weight = tables(tree, seed)
    points = on_path(tree, advantage, weight)
    rows = points.columns
    assert rows["weight"].sum().item() == pytest.approx(1, abs=1e-6)
    gain = (rows["weight"] * rows["advantage"]).sum()
    torch.testing.assert_close(gain, (weight * advantage).sum(), atol=1e-6, rtol=1e-5)
    for source, target, w, a in zip(
        *(rows[n].flatten() for n in ("latents", "next_latents", "weight", "advantage")), strict=True
    ):
        here = (tree.source[tree.edge] == source) & (tree.target[tree.edge] == target)
        torch.testing.assert_close(w, weight[here].sum())
        torch.testing.assert_close(w * a, (weight * advantage)[here].sum(), atol=1e-7, rtol=1e-5)
    assert len(points) == len(tree.edge[weight > 0].unique())


def test_a_row_carries_its_own_transition():
    tree = grow(forks={0: 2, 2: 3}, noisy=(0, 2, 3))
    weight = torch.zeros(tree.edge.shape)
    weight[:, [0, 2, 3]] = 1 / (3 * len(weight))
    points = on_path(tree, weight, weight)
    (rows,) = points.split(10_000)
    for b in range(len(points)):
        edge = (tree.target == points.columns["next_latents"][b]).nonzero().item()
        assert torch.equal(rows["latents"][b, 0], tree.states[tree.source[edge]])
        assert torch.equal(rows["next_latents"][b, 0], tree.states[tree.target[edge]])
        assert rows["log_prob_old"][b, 0] == tree.log_prob[edge] and rows["prompt"][b] == tree.edge_prompt[edge]
        assert rows["sigma"][b, 0] == tree.sigmas[tree.step[edge]]
        assert rows["sigma_next"][b, 0] == tree.sigmas[tree.step[edge] + 1]
    assert rows["latents"].shape == (len(points), 1, 3)


@pytest.mark.parametrize("size", [1, 2, 5, 10_000])
def test_micro_batches_hold_whole_calls_and_every_row_once(size):
    """The decisions that leave one state stay together, so that the network sees it once."""
    tree = grow(forks={0: 2, 2: 3})
    points = on_path(tree, *tables(tree))
    batches = list(points.split(size))
    calls = [set(batch["call"].flatten().tolist()) for batch in batches]
    assert all(len(some) == size for some in calls[:-1]) and 0 < len(calls[-1]) <= size
    assert sum(map(len, calls)) == points.calls == len(set().union(*calls))
    for name in ("prompt", "call", "advantage", "weight", "sigma", "log_prob_old"):
        assert torch.equal(torch.cat([batch[name] for batch in batches]), points.columns[name])


def chunked(roots=1, children=12, sizes=(2, 3, 4, 7), kept=lambda mask: mask):
    """Chunk-GRPO's rows: leaves that fork at the first step, in chunks."""
    tree = grow(roots=roots, steps=sum(sizes) + 1, forks={0: children})
    mask = torch.ones(tree.edge.shape)
    mask[:, -1] = 0
    chunk = torch.cat([torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)), torch.tensor([-1])])
    return on_chunks(tree, torch.randn(mask.shape, generator=generator(1)), weights.token_mean(kept(mask)), chunk)


def distinct(rows):
    """Calls of each row; what fills up a short one is a call that it has already."""
    return [len(set(row)) for row in rows["call"].tolist()]


@pytest.mark.parametrize("size", [1, 2, 4, 7, 8, 13, 64, 10_000])
def test_a_micro_batch_of_chunks_holds_no_more_calls_than_it_may(size):
    """All rows once, in order; more than `size` calls only where one row needs them, and none that is half empty."""
    points = chunked(roots=2)
    batches = list(points.split(size))
    assert torch.equal(torch.cat([batch["call"] for batch in batches]), points.columns["call"])
    for batch in batches:
        assert len(batch["call"].unique()) <= size or len(batch["call"]) == 1
    for one, following in itertools.pairwise(batches):
        both = torch.cat([one["call"], following["call"]]).unique()
        assert len(both) > size, "two that could have been one"
    if size >= 13:  # the twelve that leave one state
        assert sum(len(batch["call"].unique()) for batch in batches) == points.calls


def test_micro_batches_of_chunks_are_filled():
    """12 leaves of one noise in chunks of 2, 3, 4, 7: 13 calls of the first ones, and 3, 4 and 7 of every other."""
    sizes = [len(batch["call"].unique()) for batch in chunked().split(8)]
    assert sizes[:2] == [8, 6] and sum(sizes) == 13 + 1 + 12 * (3 + 4 + 7)
    assert sizes.count(8) >= 6, "two of 4 calls fit into one of 8"


def test_what_a_micro_batch_of_chunks_repeats_does_not_depend_on_the_trees_before():
    """D2, D11: so several processes make the calls of one."""
    alone, both = ([len(b["call"].unique()) for b in chunked(roots=n, children=5).split(4)] for n in (1, 2))
    assert sum(both) == 2 * sum(alone)


def test_chunks_that_are_trained_in_part_share_the_calls_that_they_have():
    points = chunked(kept=lambda mask: mask * (torch.arange(mask.shape[1]) != 0))
    assert sorted(distinct(points.columns)) == [1] * 12 + [3] * 12 + [4] * 12 + [7] * 12
    assert all(len(batch["call"].unique()) <= 7 for batch in points.split(7))


def test_rows_can_be_left_out_without_changing_the_weights_of_the_others():
    tree = grow(forks={0: 2})
    points = on_path(tree, *tables(tree))
    kept = points.columns["advantage"][:, 0] > 0
    fewer = points.where(kept)
    assert 0 < len(fewer) < len(points)
    assert torch.equal(fewer.columns["weight"], points.columns["weight"][kept])
    assert sum(len(batch["weight"]) for batch in fewer.split(2)) == len(fewer)


def test_no_rows_make_no_micro_batches():
    tree = grow()
    points = on_path(tree, *tables(tree))
    nothing = points.where(torch.zeros(len(points), dtype=torch.bool))
    assert len(nothing) == 0 and list(nothing.split(4)) == [] and nothing.calls == 0


def test_a_transition_that_was_not_kept_is_our_own_mistake():
    tree = grow(noisy=(0,))
    weight = torch.zeros(tree.edge.shape)
    weight[:, 2] = 0.5
    with pytest.raises(AssertionError, match="was not kept by the rollout"):
        on_path(tree, weight, weight)


def test_spare_rows_fill_up_to_what_the_ranks_agreed_on():
    """D11: a transition that was drawn, of weight 0, with a call of its own below 0; the real rows come first."""
    tree = grow(forks={0: 2, 2: 3})
    points = on_path(tree, *tables(tree))
    batches = list(points.split(5, lambda count: count + 2))
    assert [is_spare(batch) for batch in batches] == [False] * (len(batches) - 2) + [True] * 2
    assert sum(len(batch["weight"]) for batch in batches[:-2]) == len(points)
    spare = batches[-1]
    assert spare["weight"].tolist() == spare["advantage"].tolist() == [[0.0]] and bool(spare["log_prob_old"].isfinite())
    edge = (tree.target == points.spare["next_latents"][0]).nonzero().item()
    assert torch.equal(spare["latents"][0, 0], tree.states[tree.source[edge]])
    assert spare["sigma"] == tree.sigmas[tree.step[edge]] and spare["prompt"] == tree.edge_prompt[edge]


def test_a_rank_without_a_row_makes_only_spare_ones():
    tree = grow()
    points = on_path(tree, *tables(tree))
    nothing = points.where(torch.zeros(len(points), dtype=torch.bool))
    assert [is_spare(rows) for rows in nothing.split(4, lambda count: 3)] == [True] * 3


@pytest.mark.parametrize("together", [False, True])
def test_a_spare_row_on_noise_has_the_shape_of_the_others(together):
    """With all levels in a row, each has a call of its own."""
    tree = grow(noisy=())
    drawn = Drawn(torch.rand(2, 3, generator=generator(0)), torch.arange(6).view(2, 3), torch.randn(6, 3))
    weight = torch.tensor([[0.0] * 5, [0.2] * 5])
    points = on_noise(tree, torch.ones(2, 5), weight, drawn, together=together)
    *real, spare = points.split(100, lambda count: count + 1)
    assert len(points) == len(real[0]["weight"]) == (1 if together else 3)
    assert spare["call"].tolist() == ([[-1, -2, -3]] if together else [[-1]]) and not spare["weight"].any()
    for name, column in real[0].items():
        assert spare[name].shape[1:] == column.shape[1:] and spare[name].dtype == column.dtype, name
