"""flowrl/objectives/clipped.py: clipped surrogates."""

import pytest
import torch

from flowrl.objectives.clipped import ppo_clip


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
