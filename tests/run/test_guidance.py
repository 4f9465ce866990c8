"""flowrl/run/guidance.py: the rewards choose among draws at every step."""

import pytest
import torch

from flowrl.recipes import find
from flowrl.run.evaluation import Settings
from flowrl.run.guidance import sample_guided, step_kernel
from flowrl.visual.policy import Example

EXAMPLES = [Example("0"), Example("2"), Example("0")]  # the even ones want red


def drawn(toy, loop, count, batch_size=64, samples=8, key="flow_grpo"):
    settings = Settings(steps=6, guidance=1.0, samples=samples, seed=0, batch_size=batch_size)
    return sample_guided(toy(), EXAMPLES, settings, step_kernel(find(key)()), loop.score, count=count)


def test_more_draws_of_a_step_score_higher(toy, loop):
    plain, guided = (drawn(toy, loop, count)[:, 0].mean().item() for count in (1, 6))
    assert guided > plain + 0.1


@pytest.mark.parametrize("key", ["flow_grpo", "diffusion_nft"])
def test_pictures_depend_on_their_example_and_sample_alone(toy, loop, key):
    """Whatever else is in the batch; a recipe that draws nothing is guided by Flow-SDE's noise."""
    whole, apart = drawn(toy, loop, 3, key=key), drawn(toy, loop, 3, batch_size=1, key=key)
    assert whole.shape == (24, 3, 1, 1) and len(whole.flatten(1).unique(dim=0)) == 24
    torch.testing.assert_close(whole, apart, atol=1e-5, rtol=0)


def test_a_kernel_that_depends_on_the_depth_in_a_tree_is_refused():
    """growing_sde of dynamic_tree_rpo: its eta would grow beyond the four steps of its tree."""
    with pytest.raises(ValueError, match=r"^--guide: rollout\.kernel growing_sde asks for the depth .*=flow_sde\.$"):
        step_kernel(find("dynamic_tree_rpo")())
