"""flowrl/advantages/steps.py: credit step by step."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.advantages import steps, tree
from flowrl.part import part
from samplers import kernels, schedules, tree_layout

GRID = schedules.shifted(torch.linspace(1, 0, 11, dtype=torch.float64), shift=3.0)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def straight(rollouts, length=10):
    return torch.arange(rollouts * length).view(rollouts, length)


def test_gains_are_standardised_over_all_steps_of_a_group_together():
    score, group = draw(8, 11), torch.arange(2).repeat_interleave(4)
    ours = steps.gain(score, straight(8), group, clamp=1e9)
    for value in (0, 1):
        gains = score[group == value].diff(dim=1)
        torch.testing.assert_close(ours[group == value], (gains - gains.mean()) / gains.std(unbiased=False))
        assert ours[group == value].sum().item() == pytest.approx(0, abs=1e-9)


def test_gains_of_a_rollout_telescope_to_what_it_won_in_all():
    """Undo the common shift and scale of a group: the sum over steps is r_0 - r_T."""
    score = draw(4, 11)
    ours = steps.gain(score, straight(4), torch.zeros(4, dtype=torch.long), clamp=1e9)
    gains = score.diff(dim=1)
    total = (ours * gains.std(unbiased=False) + gains.mean()).sum(1)
    torch.testing.assert_close(total, score[:, -1] - score[:, 0])


def test_a_score_that_never_moves_earns_exactly_0():
    score = draw(4, 1).expand(4, 11)
    assert not steps.gain(score, straight(4), torch.zeros(4, dtype=torch.long)).any()


def test_only_the_step_that_moved_the_score_is_told_apart():
    """The score is constant until the end: all other steps get one and the same credit."""
    score = torch.zeros(2, 11, dtype=torch.float64)
    score[:, -1] = torch.tensor([1.0, 2.0])
    ours = steps.gain(score, straight(2), torch.zeros(2, dtype=torch.long))
    assert len(ours[:, :-1].unique()) == 1 and bool((ours[:, -1] > 0).all()) and ours[1, -1] > ours[0, -1]


def test_steps_that_do_not_exist_have_no_part_in_the_gains():
    score, edge = draw(3, 5), straight(3, 4)
    cut = edge.clone()
    cut[2, 2:] = -1
    ours = steps.gain(score, cut, torch.zeros(3, dtype=torch.long), clamp=1e9)
    gains = score.diff(dim=1)
    known = gains[cut >= 0]
    assert not ours[cut < 0].any()
    torch.testing.assert_close(ours[cut >= 0], (known - known.mean()) / known.std(unbiased=False))


def one_walk(length, count):
    """The table of one walk with `count` candidates a step, of which the first goes on; the others end there."""
    edge, rows = torch.arange(length * count).view(length, count), []
    for t in range(length):
        for c in range(1 if t < length - 1 else 0, count):
            rows.append([int(edge[s, 0]) for s in range(t)] + [int(edge[t, c])] + [-1] * (length - t - 1))
    return torch.tensor(rows)


@given(length=st.integers(1, 5), count=st.integers(2, 5), seed=st.integers(0, 99))
def test_candidates_are_compared_with_those_that_left_the_same_state(length, count, seed):
    edge = one_walk(length, count)
    value = draw(length * count, seed=seed)
    score = torch.cat([torch.zeros(len(edge), 1).double(), torch.where(edge >= 0, value[edge], torch.nan)], dim=1)
    ours = steps.siblings(score.nan_to_num(), edge, torch.zeros(len(edge), dtype=torch.long), clamp=1e9)
    for t in range(length):
        peers = value[t * count : (t + 1) * count]
        expected = (peers - peers.mean()) / peers.std()
        of_edge = dict(zip(edge[:, t].tolist(), ours[:, t].tolist(), strict=True))
        assert sum(of_edge.values()) == pytest.approx(0, abs=1e-6)  # every candidate of the step once
        for n, e in enumerate(edge[:, t].tolist()):
            assert ours[n, t].item() == pytest.approx(float(expected[e - t * count]) if e >= 0 else 0, abs=1e-6)


def test_one_candidate_a_step_earns_0():
    """DRM with k = 1 is the plain sampler."""
    assert not steps.siblings(draw(3, 5), straight(3, 4), torch.arange(3)).any()


def test_candidates_of_two_noises_are_not_compared():
    edge = torch.tensor([[0], [1], [2], [3]])
    score = torch.tensor([[0.0, 0.1], [0, 0.3], [0, 5.0], [0, 5.2]])
    ours = steps.siblings(score, edge, torch.tensor([0, 0, 1, 1]))
    torch.testing.assert_close(ours[:, 0], torch.tensor([-1.0, 1, -1, 1]) / 2**0.5, atol=1e-5, rtol=0)


MULTIPLIERS = [steps.noise_aware, steps.snr_aware, steps.per_dt, steps.per_slope, steps.equalised]


def schedule(kernel):
    stds, slopes = kernels.scales(kernel, GRID)
    return {"sigmas": GRID, "stds": stds, "slopes": slopes}


@pytest.mark.parametrize("multiplier", MULTIPLIERS, ids=lambda f: f.__name__)
def test_a_multiplier_is_the_same_for_every_rollout_and_positive(multiplier):
    advantage, edge = draw(6), straight(6)
    ours = part(multiplier)(advantage=advantage, edge=edge, **schedule(kernels.flow_sde))
    weight = ours / advantage[:, None]
    torch.testing.assert_close(weight, weight[:1].expand(6, 10))
    assert bool((weight > 0).all()) and bool((ours.sum(0) / advantage.sum() > 0).all())
    edge = edge.clone()
    edge[2, 3:] = -1
    missing = part(multiplier)(advantage=advantage, edge=edge, **schedule(kernels.flow_sde))
    assert not missing[2, 3:].any() and torch.equal(missing[:2], ours[:2])


@pytest.mark.parametrize("multiplier", [steps.noise_aware, steps.snr_aware], ids=lambda f: f.__name__)
def test_noise_weights_have_mean_1_over_the_trainable_steps(multiplier):
    for kernel in (kernels.flow_sde, kernels.dance_sde, kernels.sage):
        ours = part(multiplier)(advantage=draw(1) * 0 + 1, edge=straight(1), **schedule(kernel))
        assert ours[0, :-1].mean().item() == pytest.approx(1)


def test_a_noise_of_one_strength_gives_uniform_credit():
    """SuperFlow with g constant."""
    advantage, edge = draw(4), straight(4)
    ours = steps.noise_aware(advantage, edge, torch.full((10,), 0.3).double())
    torch.testing.assert_close(ours, tree.broadcast(advantage, edge))


def test_guards_weight_is_one_over_the_length_of_the_step():
    ours = steps.per_dt(torch.ones(1).double(), straight(1), GRID, eps=0.0)
    torch.testing.assert_close(ours[0], 1 / -GRID.diff())


def test_flow_sde_moves_by_a_constant_times_dt_so_both_guards_agree_up_to_it():
    """d mean / d velocity = dt (1 + eta^2 / 2), but for the first step, whose guard changes it."""
    at = schedule(kernels.flow_sde)
    one, edge = torch.ones(1).double(), straight(1)
    ratio = steps.per_dt(one, edge, GRID, eps=0.0) / steps.per_slope(one, edge, at["slopes"])
    torch.testing.assert_close(ratio[0, 1:], torch.full((9,), 1 + 0.49 / 2).double())


@pytest.mark.parametrize("kernel", [kernels.sage, kernels.dance_sde, kernels.flow_sde], ids=lambda f: f.__name__)
def test_equalised_steps_have_gradients_of_one_size(kernel):
    at = schedule(kernel)
    weight = steps.equalised(torch.ones(1).double(), straight(1), at["stds"], at["slopes"])[0]
    size = at["slopes"].abs() / at["stds"]
    torch.testing.assert_close(weight * size, size[:-1].median().expand(10))


def test_a_lone_trainable_step_is_not_rescaled_and_one_without_noise_earns_0():
    weight = steps.equalised(torch.ones(1), torch.arange(2)[None], torch.tensor([0.3, 0.0]), torch.tensor([-0.2, -0.1]))
    assert weight.tolist() == [[1, 0]]


def test_gains_may_be_scored_on_a_tree():
    """Leaves that share a prefix share its gains."""
    layout = tree_layout(1, 4, (0, 2), {0: 2, 2: 3})
    value = draw(len(layout.source))
    score = torch.cat([torch.zeros(6, 1).double(), value[layout.edge]], dim=1)
    ours = steps.gain(score, layout.edge, layout.leaf_root)
    assert torch.equal(ours[0, :2], ours[1, :2]) and not torch.equal(ours[0, 2:], ours[1, 2:])
