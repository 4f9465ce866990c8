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


@pytest.mark.parametrize(("batch_size", "together"), [(1, 3), (4, 3), (7, 6), (64, 63)])
def test_no_more_rows_at_once_than_a_batch_holds(toy, loop, monkeypatch, batch_size, together):
    """24 pictures, 3 draws of a step: the network sees a batch; rewards too, but all draws of a state together."""
    policy, seen, scored = toy(), [], []
    velocity = policy.velocity
    monkeypatch.setattr(policy, "velocity", lambda x, *rest: seen.append(len(x)) or velocity(x, *rest))

    def score(images, examples, group):
        scored.append(len(images))
        assert group.unique(return_counts=True)[1].eq(3).all()
        return loop.score(images, examples, group)

    settings = Settings(steps=6, guidance=1.0, samples=8, seed=0, batch_size=batch_size)
    pictures = sample_guided(policy, EXAMPLES, settings, step_kernel(find("flow_grpo")()), score, count=3)
    assert len(pictures) == 24 and max(seen) <= batch_size and max(scored) == together
