"""Sana: the instruction, the shift of its multi-step scheduler, its timesteps."""

import inspect

import pytest
import torch
from diffusers import SanaPipeline
from tiny_pipelines.sana import pipeline

from flowrl import randomness
from flowrl.visual.pipelines import grids
from flowrl.visual.pipelines.sana import Sana
from flowrl.visual.policy import Example
from samplers import rollout

ONCE_SHIFTED = [1, 0.964286, 0.923077, 0.875, 0.818182, 0.75, 0.666667, 0.5625, 0.428571, 0.25, 0]
PROMPTS = ["a red circle", "two blue squares"]


@pytest.fixture(scope="module")
def policy(policy_of):
    return policy_of("sana")


def test_the_schedulers_own_levels_are_shifted_once(policy, plain_of):
    """Euler's set_timesteps(10) shifts twice and ends at 0.0089; DPM-Solver and explicit levels do not."""
    scheduler = plain_of("sana").scheduler
    scheduler.set_timesteps(10)
    own, linear = policy.family.sigmas(10, "pipeline"), policy.family.sigmas(10, "linear")
    assert torch.equal(own[1:], scheduler.sigmas[1:]) and own.dtype == torch.float32
    assert own[0] == 1 and 0.999 < scheduler.sigmas[0] < 1, "it stops short of 1 for its logarithms"
    level = 0.999 * torch.linspace(1, 0, 11)
    assert torch.allclose(own[1:], (3 * level / (1 + 2 * level))[1:], atol=1e-6)
    assert own.tolist() == pytest.approx(ONCE_SHIFTED, abs=1e-3)
    assert linear.tolist() == pytest.approx(ONCE_SHIFTED, abs=1e-6)


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_explicit_levels_draw_what_the_pipeline_draws_with_eulers_scheduler(policy_of, plain_of, guidance):
    policy, pipe = policy_of("sana", grid="linear"), plain_of("sana")
    pipe.scheduler, noise = grids.euler(pipe.scheduler), policy.noise(2, randomness.generator(0, "test"))
    assert pipe.scheduler.shift == 3.0
    policy.guidance = guidance
    with torch.no_grad():
        ours = rollout(policy.velocity, noise, policy.encode([Example(p) for p in PROMPTS]), policy.sigmas(4)).leaves()
    theirs = pipe(
        prompt=PROMPTS, negative_prompt=["", ""], guidance_scale=guidance, num_inference_steps=4,
        sigmas=[1, 0.75, 0.5, 0.25], latents=noise, height=32, width=32, max_sequence_length=12, output_type="latent",
        use_resolution_binning=False,
    ).images  # fmt: skip
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_prompts_follow_the_instruction_and_negative_prompts_do_not(policy, plain_of):
    pipe, device = plain_of("sana"), torch.device("cpu")
    instruction = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
    given = {"negative_prompt": "a red circle", "max_sequence_length": 12, "complex_human_instruction": instruction}
    tokens, mask, negative, without = pipe.encode_prompt("a red circle", device=device, **given)
    prompt = policy.family.encode("a red circle", (), device)
    away = policy.family.encode_negative("a red circle", (), device)
    assert torch.equal(prompt["tokens"], tokens[0]) and torch.equal(prompt["mask"], mask[0])
    assert torch.equal(away["tokens"], negative[0]) and torch.equal(away["mask"], without[0])
    read = len(pipe.tokenizer("a red circle").input_ids)
    assert (away["mask"].sum(), prompt["mask"].sum()) == (read, read + 1)  # the last token of the instruction more
    assert not torch.equal(prompt["tokens"], away["tokens"])


def test_a_text_may_be_a_prompt_and_a_negative_prompt_in_one_run(policy_of):
    policy = policy_of("sana")
    policy.guidance = 2.0
    policy.encode([Example("a red circle", "two blue squares"), Example("two blue squares", "a red circle")])
    kept = dict(policy._texts.items())
    assert len(kept) == 4
    assert not torch.equal(kept["a red circle", (), False]["tokens"], kept["a red circle", (), True]["tokens"])


def test_the_transformer_is_told_the_scaled_timestep_once_per_step(policy_of, spied):
    policy = policy_of("sana")
    calls, sigmas = spied(policy.pipe.transformer), policy.sigmas(3)
    noise = policy.noise(2, randomness.generator(0, "test"))
    for policy.guidance, rows in ((1.0, 2), (3.0, 4)):
        with torch.no_grad():
            rollout(policy.velocity, noise, policy.encode([Example(p) for p in PROMPTS]), sigmas)
        told = torch.stack([call.timestep for call in calls])
        assert torch.equal(told, 500 * sigmas[:-1, None].expand(3, rows))
        calls.clear()


def test_a_network_that_predicts_its_variance_too_gives_the_velocity(policy):
    pipe = policy.pipe
    latents, sigma = torch.randn(1, 4, 8, 8), torch.tensor([0.5])
    text = policy.family.encode("a red circle", (), torch.device("cpu"))
    forward = pipe.transformer.forward
    try:
        pipe.transformer.forward = lambda **inputs: (torch.cat([forward(**inputs)[0], torch.ones(1, 4, 8, 8)], 1),)
        wide = policy.family.velocity(latents, sigma, [text], None)
    finally:
        pipe.transformer.forward = forward
    assert torch.equal(wide, policy.family.velocity(latents, sigma, [text], None))


def test_prompts_that_the_instruction_leaves_no_room_for_are_counted(policy):
    """Of 12 tokens one is <bos> and one the end of the instruction."""
    nine = " ".join("a" * 9)
    assert not policy.warnings([Example(f"{nine} b")])
    (line,) = policy.warnings([Example(f"{nine} b"), Example(f"{nine} a b")])
    assert line.startswith("1 of 2 prompts exceed the tokenizer's 11 tokens")
    for start, alike in ((nine, False), (f"{nine} a", True)):
        one, other = (policy.family.encode(f"{start} {end}", (), torch.device("cpu"))["tokens"] for end in "bc")
        assert torch.equal(one, other) == alike


def test_sizes(policy):
    pipe = policy.pipe
    assert Sana(pipe).shape() == (4, 8, 8) and Sana(pipe, (64, 96)).shape() == (4, 16, 24)
    with pytest.raises(ValueError, match=r"model.size = 40: accepted are multiples of 32, such as 32 or 64\.$"):
        Sana(pipe, 40)


def test_another_prediction_is_refused(policy_of):
    pipe = pipeline()
    pipe.scheduler = type(pipe.scheduler)(prediction_type="epsilon")
    with pytest.raises(ValueError, match="DPMSolverMultistepScheduler: its noise levels are no flow's"):
        Sana(pipe).sigmas(1, "pipeline")
