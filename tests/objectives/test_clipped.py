"""flowrl/objectives/clipped.py: clipped surrogates."""

import pytest
import torch

from flowrl.objectives.clipped import dppo, ppo_clip, ppo_clip_by_outcome, unclipped


@pytest.mark.parametrize(
    "ratio, advantage, slope",
    [(1.3, 2.0, 0.0), (0.7, 2.0, -2.0), (1.3, -2.0, 2.0), (0.7, -2.0, 0.0), (1.05, 2.0, -2.0), (0.95, -2.0, 2.0)],
)
def test_the_gradient_stops_only_on_the_side_that_would_gain(ratio, advantage, slope):
    """C105: clipping depends on the sign of the advantage."""
    x = torch.tensor([[ratio]], requires_grad=True)
    ppo_clip(x, torch.tensor([[advantage]]), clip_low=0.2, clip_high=0.1).sum().backward()
    assert x.grad.item() == slope


def test_the_two_sides_have_ranges_of_their_own():
    ratio, advantage = torch.tensor([[1.5, 0.5]]), torch.tensor([[1.0, -1.0]])
    loss = ppo_clip(ratio, advantage, clip_low=0.1, clip_high=0.3)
    torch.testing.assert_close(loss, torch.tensor([[-1.3, 0.9]]))


def test_a_good_sample_may_move_further_up_and_a_bad_one_further_down():
    """clip .1, sensitivity .5: up to .15 for an advantage of 1 or more, in between in proportion."""
    bounds = {"clip_low": 0.1, "clip_high": 0.1, "sensitivity": 0.5}
    advantage = torch.tensor([[0.4, 1.0, 3.0, -0.4, -1.0, -3.0]])
    far = torch.where(advantage > 0, 2.0, 0.1)
    reached = ppo_clip_by_outcome(far, advantage, **bounds) / -advantage
    torch.testing.assert_close(reached, torch.tensor([[1.12, 1.15, 1.15, 0.88, 0.85, 0.85]]))
    wrong_way = torch.where(advantage > 0, 0.1, 2.0)
    torch.testing.assert_close(ppo_clip_by_outcome(wrong_way, advantage, **bounds), -advantage * wrong_way)


def test_without_sensitivity_or_advantage_the_range_is_that_of_ppo_clip():
    ratio = torch.linspace(0.5, 1.5, 11)[None]
    for advantage in (torch.full((1, 11), 0.7), torch.full((1, 11), -0.7)):
        ours = ppo_clip_by_outcome(ratio, advantage, clip_low=0.1, clip_high=0.2, sensitivity=0.0)
        assert torch.equal(ours, ppo_clip(ratio, advantage, clip_low=0.1, clip_high=0.2))
    for sign, bound in ((1.0, 1.1), (-1.0, 0.9)):  # as the reward goes to the mean of its group
        advantage = torch.full((1, 1), sign * 1e-6)
        far = torch.full((1, 1), 2.0 if sign > 0 else 0.1)
        ours = ppo_clip_by_outcome(far, advantage, clip_low=0.1, clip_high=0.1, sensitivity=0.5)
        assert (ours / -advantage).item() == pytest.approx(bound, abs=1e-5)


def test_an_unclipped_gain_never_stops():
    ratio = torch.tensor([[9.0, 0.1]], requires_grad=True)
    unclipped(ratio, torch.tensor([[2.0, -1.0]])).sum().backward()
    assert ratio.grad.tolist() == [[-2, 1]]


FAR = 0.3  # KL of .045 at std 1


@pytest.mark.parametrize(
    ("ratio", "advantage", "shift", "slope"),
    [
        (1.1, 2.0, FAR, 0.0),
        (0.9, 2.0, FAR, -2.0),
        (1.1, -2.0, FAR, 2.0),
        (0.9, -2.0, FAR, 0.0),
        (1.1, 2.0, 0.01, -2.0),
        (0.9, -2.0, 0.01, 2.0),
        (1.1, 0.0, FAR, 0.0),
    ],
)
def test_flow_dppo_stops_where_the_step_moved_far_and_its_way(ratio, advantage, shift, slope):
    x, mean = torch.tensor([[ratio]], requires_grad=True), torch.zeros(1, 1, 4)
    dppo(x, torch.tensor([[advantage]]), mean + shift, mean, torch.ones(1, 1), largest=1e-3).sum().backward()
    assert x.grad.item() == slope


def test_flow_dppo_is_finite_where_a_ratio_is_not():
    """A `where`, not a product: inf * 0 is nan."""
    x, mean = torch.tensor([[torch.inf]], requires_grad=True), torch.zeros(1, 1, 4)
    loss = dppo(x, torch.tensor([[1.0]]), mean + 9, mean, torch.ones(1, 1))
    loss.sum().backward()
    assert loss.item() == 0 and x.grad.item() == 0


def test_flow_dppos_default_is_the_published_threshold():
    """KL just above and just below 1e-5."""
    for shift, loss in ((4.5e-3, 0.0), (4.4e-3, -1.01)):
        mean = torch.zeros(1, 1, 4, dtype=torch.float64)
        one, ratio = torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1), 1.01, dtype=torch.float64)
        assert dppo(ratio, one, mean + shift, mean, one).item() == pytest.approx(loss)
