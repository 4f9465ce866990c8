"""PixArt-Sigma: no adapters, the variance beside epsilon, padded texts."""

import pytest
import torch
from tiny_pipelines.pixart import TOKENS, pipeline

from flowrl import randomness
from flowrl.visual.pipelines import blueprint, contract, footprint, grids, opening
from flowrl.visual.policy import Example

PROMPTS = [Example("a red circle"), Example("two blue squares")]


def noise_of(policy, n):
    return policy.noise(n, randomness.generator(0, "test"))


def test_lora_is_refused_in_one_line(policy_of):
    with pytest.raises(ValueError) as caught:
        policy_of("pixart", train="lora")
    assert "PixArtTransformer2DModel takes no adapters; use model.train = full." in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_variance_that_is_predicted_beside_epsilon_is_dropped(policy_of, spied):
    policy = policy_of("pixart")
    prompt, latents, sigma = policy.encode(PROMPTS), noise_of(policy, 2), torch.tensor([0.9, 0.3])
    with torch.no_grad():
        before = policy.velocity(latents, sigma, prompt)
        last = policy.pipe.transformer.proj_out.weight.view(2, 2, 8, -1)
        last[:, :, 4:] += 1.0
        assert before.shape == (2, 4, 8, 8) and torch.equal(policy.velocity(latents, sigma, prompt), before)
        last[:, :, :4] += 1.0
        assert not torch.allclose(policy.velocity(latents, sigma, prompt), before)


def test_padding_is_not_read(policy_of):
    policy = policy_of("pixart")
    prompt, latents, sigma = policy.encode(PROMPTS[:1]), noise_of(policy, 1), torch.tensor([0.5])
    text = policy._active[0][0]
    assert text["tokens"].shape == (TOKENS, 16) and text["mask"].tolist() == [1] * 4 + [0] * (TOKENS - 4)
    with torch.no_grad():
        before = policy.velocity(latents, sigma, prompt)
        text["tokens"][4:] = 3.0
        assert torch.equal(policy.velocity(latents, sigma, prompt), before)
        text["tokens"][3] = 3.0
        assert not torch.allclose(policy.velocity(latents, sigma, prompt), before)


def test_the_grid_begins_where_dpm_solver_does(policy_of, plain_of):
    """At the last timestep, although DDIM's own spacing would begin below it."""
    policy, scheduler = policy_of("pixart"), plain_of("pixart").scheduler
    levels = grids.table(scheduler)
    assert len(levels) == 1200 and float(levels[-1]) == pytest.approx(0.9937, abs=1e-3)
    scheduler.set_timesteps(4)
    assert scheduler.timesteps.tolist() == [1199, 899, 600, 300]
    assert torch.equal(policy.sigmas(4)[:-1], levels[[1199, 899, 599, 299]])


def test_of_a_thousand_timesteps_three_steps_are_nearly_ddims():
    """Its step from 666 ends at 333, and the next one is told 332; here both are 332."""
    policy = opening.adopt(
        pipeline(1000), dtype=torch.float32, device=torch.device("cpu"), rank=0, alpha=0.0, max_sequence_length=TOKENS
    )
    assert torch.equal(policy.sigmas(3)[:-1], grids.table(policy.pipe.scheduler)[[999, 666, 332]])
    policy.pipe.set_progress_bar_config(disable=True)
    assert contract.pictures_apart(policy, PROMPTS, steps=3, guidance=1.0) < 5e-3


@pytest.mark.parametrize(("size", "near"), [(20, "16 or 24"), (2, "8")])
def test_a_size_between_patches_is_refused_with_the_nearest(policy_of, size, near):
    with pytest.raises(ValueError, match=rf"model.size = {size}: accepted are multiples of 8, such as {near}\."):
        policy_of("pixart", size=size)


def test_a_prompt_longer_than_asked_for_is_counted(policy_of):
    found = policy_of("pixart").warnings([Example("a red circle " * 4), Example("a green dragon")])
    assert any(line.startswith(f"1 of 2 prompts exceed the tokenizer's {TOKENS} tokens") for line in found)
    assert any("1 of 2 prompts have words that the tokenizer does not know" in line for line in found)


def test_memory_is_measured_without_weights(saved):
    plan = blueprint.read(saved("pixart"))
    family = plan.family(plan.pipe, size=16, max_sequence_length=TOKENS)
    found = footprint.activations(family, torch.float32)
    assert 0 < found.block < found.checkpointed < found.kept
