"""Wan: its levels, its frames, the experts of 2.2 and the tokens' timesteps of the 5B."""

import pytest
import torch
from diffusers import UniPCMultistepScheduler

from flowrl import randomness
from flowrl.visual.pipelines import contract, opening
from flowrl.visual.pipelines.wan import Wan
from flowrl.visual.policy import Example
from samplers import rollout

UNIPC = [1.0, 0.964324, 0.923166]  # METHODS of flow shift 3 in ten steps; the last but one is 0.251872
PROMPTS = ["a red circle", "two blue squares"]


def ask(policy, sigma):
    """Velocities at these levels, of latents that are always the same."""
    latents = policy.noise(len(sigma), randomness.generator(0, "test"))
    ids = policy.encode([Example(p) for p in PROMPTS])
    return policy.velocity(latents, torch.tensor(sigma), ids[torch.arange(len(sigma)) % 2])


def test_the_levels_are_those_of_unipc(policy_of, plain_of):
    own, scheduler = policy_of("wan2.1").sigmas(10), plain_of("wan2.1").scheduler
    assert isinstance(scheduler, UniPCMultistepScheduler)
    scheduler.set_timesteps(10)
    assert torch.equal(own[1:], scheduler.sigmas[1:]) and own.dtype == torch.float32
    assert own[0] == 1 and 0.999 < scheduler.sigmas[0] < 1, "it stops short of 1 for its logarithms"
    assert own[:3].tolist() == pytest.approx([1, *UNIPC[1:]], abs=1e-6) and own[-2:].tolist() == pytest.approx(
        [0.251872, 0]
    )


def test_a_grid_that_the_pipeline_has_not_is_refused(policy_of):
    with pytest.raises(ValueError, match="'linear': WanPipeline accepts pipeline"):
        policy_of("wan2.1", grid="linear")


def test_rows_go_through_the_expert_of_their_side_alone(policy_of, spied):
    policy = policy_of("wan2.2")
    first, second = spied(policy.pipe.transformer), spied(policy.pipe.transformer_2)
    with torch.no_grad():
        mixed = ask(policy, [0.3, 0.9, 0.875, 0.874])
    assert [call.timestep.tolist() for call in first] == [pytest.approx([900, 875])]
    assert [call.timestep.tolist() for call in second] == [pytest.approx([300, 874])]
    for sigma, calls in (([0.9, 0.9], (1, 0)), ([0.3, 0.3], (0, 1))):
        first.clear(), second.clear()
        with torch.no_grad():
            out = ask(policy, sigma)
        assert (len(first), len(second)) == calls
        row = 1 if sigma[0] > 0.5 else 0
        assert torch.allclose(out[row], mixed[row], atol=1e-6)


def test_guidance_is_a_second_row_of_the_same_call(policy_of, spied):
    policy = policy_of("wan2.2")
    calls = [spied(policy.pipe.transformer), spied(policy.pipe.transformer_2)]
    noise = policy.noise(2, randomness.generator(0, "test"))
    for policy.guidance, rows in ((1.0, 2), (4.0, 4)):
        with torch.no_grad():
            rollout(policy.velocity, noise, policy.encode([Example(p) for p in PROMPTS]), policy.sigmas(4))
        assert [[len(call.hidden_states) for call in each] for each in calls] == [[rows] * 2, [rows] * 2]
        calls[0].clear(), calls[1].clear()


def test_each_expert_is_guided_by_its_own_scale_as_in_diffusers(policy_of, plain_of):
    """guidance_2 is pipe(guidance_scale_2=...): rows below the boundary have it; the pictures are the pipeline's."""
    policy, plain = policy_of("wan2.2", guidance_2=2.5), policy_of("wan2.2")
    with torch.no_grad():
        found = {g: ask_guided(plain, g) for g in (1.0, 4.0, 2.5)}
        policy.guidance = 4.0
        mixed = ask(policy, [0.9, 0.3])
    assert torch.allclose(mixed[0], found[4.0][0]) and torch.allclose(mixed[1], found[2.5][1])
    examples = [Example(p) for p in PROMPTS]
    assert contract.pictures_apart(policy, examples, steps=4, guidance=4.0) < 1e-4
    policy.family.guidance_2, other = 6.0, drawn(policy)
    assert (drawn(policy) - other).abs().max() > 1e-3
    with pytest.raises(ValueError, match=r"model\.guidance_2 = 3 has no effect: this WanPipeline has one expert"):
        policy_of("wan2.1", guidance_2=3.0)


def ask_guided(policy, guidance):
    policy.guidance = guidance
    return ask(policy, [0.9, 0.3])


def drawn(policy):
    noise = policy.noise(1, randomness.generator(0, "test"))
    with torch.no_grad():
        return rollout(policy.velocity, noise, policy.encode([Example(PROMPTS[0])]), policy.sigmas(4)).leaves()


@pytest.mark.parametrize("sharded", [False, True])
def test_an_expert_without_rows_gets_a_gradient_of_zeros(policy_of, spied, sharded):
    """Where weights are shared out it runs on a row too, so that every process gathers every network."""
    policy = policy_of("wan2.2")
    with torch.no_grad():
        expected = ask(policy, [0.9, 0.8999])
    policy.family.sharded, calls = sharded, spied(policy.pipe.transformer_2)
    out = ask(policy, [0.9, 0.8999])
    assert torch.equal(out, expected) and [len(call.hidden_states) for call in calls] == ([1] if sharded else [])
    out.square().sum().backward()
    for name, parameter in policy.trainable():
        used = name.startswith("transformer.") and ".lora_B." in name  # B is zero, and so is A's gradient
        assert bool(parameter.grad.abs().sum() > 0) == used, name


def test_both_experts_are_trained_and_saved(policy_of, tmp_path):
    policy = policy_of("wan2.2")
    assert {name.partition(".")[0] for name, _ in policy.trainable()} == {"transformer", "transformer_2"}
    policy.save(tmp_path)
    found = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.safetensors")}
    assert found == {"pytorch_lora_weights.safetensors", "transformer_2/pytorch_lora_weights.safetensors"}


@pytest.mark.parametrize(("frames", "near"), [(2, "1 or 5"), (80, "77 or 81"), (83, "81 or 85")])
def test_other_counts_of_frames_are_refused(policy_of, frames, near):
    with pytest.raises(ValueError, match=rf"model.frames = {frames}: .* multiples of 4 plus 1, such as {near}\.$"):
        policy_of("wan2.1", frames=frames)


def test_shapes(policy_of):
    pipe, small = policy_of("wan2.1").pipe, policy_of("wan2.2-5b").pipe
    assert Wan(pipe).shape() == (16, 21, 60, 104)  # 81 frames of 480 x 832
    assert Wan(pipe, (48, 64), frames=1).shape() == (16, 1, 6, 8)
    assert Wan(small, (704, 1280), frames=121).shape() == (12, 31, 44, 80)
    with pytest.raises(ValueError, match=r"model.size = 40: accepted are multiples of 16, such as 32 or 48\.$"):
        Wan(pipe, 40)
    with pytest.raises(ValueError, match=r"model.size = 720: accepted are multiples of 32, such as 704 or 736\.$"):
        Wan(small, (720, 1280))


def test_the_tokens_of_a_row_share_its_timestep(policy_of, spied):
    policy = policy_of("wan2.2-5b")
    calls = spied(policy.pipe.transformer)
    with torch.no_grad():
        ask(policy, [0.9, 0.3])
    assert [call.timestep.tolist() for call in calls] == [pytest.approx([900, 300])]


@pytest.mark.parametrize(("name", "shape"), [("wan2.1", (2, 5, 3, 32, 32)), ("wan-image", (2, 3, 32, 32))])
def test_videos_are_decoded_one_by_one_into_8_bits(policy_of, name, shape):
    policy, rows = policy_of(name), []
    decode = policy.pipe.vae.decode
    policy.pipe.vae.decode = lambda z, **rest: rows.append(len(z)) or decode(z, **rest)
    latents = policy.noise(2, randomness.generator(0, "test"))
    pixels = policy.decode(latents)
    assert pixels.shape == shape and torch.equal((255 * pixels).round() / 255, pixels)
    assert rows == ([1, 1] if name == "wan2.1" else [2])
    raw = (policy.family.decode(latents) / 2 + 0.5).clamp(0, 1).transpose(1, 2)
    assert (pixels.view_as(raw) - raw).abs().max() <= 0.5 / 255 + 1e-4


def test_long_prompts_are_counted(policy_of):
    words = " ".join(["red"] * 11)
    policy = policy_of("wan2.1")
    assert not policy.warnings([Example(words)])
    (line,) = policy.warnings([Example(words), Example(f"{words} red")])
    assert line.startswith("1 of 2 prompts exceed the tokenizer's 12 tokens")


@pytest.mark.parametrize("loaded", [False, True])
def test_with_a_bf16_base_the_time_is_read_in_fp32_as_in_diffusers(policy_of, plain_of, loaded):
    """D16: also of a pipeline that is loaded in fp32 and cast; the embedding is that of the fp32 model, unrounded."""
    plain = plain_of("wan2.1")
    if loaded:
        known = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "rank": 4, "alpha": 8.0}
        policy = opening.adopt(plain_of("wan2.1"), **known, size=32, frames=5, max_sequence_length=12)
    else:
        policy = policy_of("wan2.1", dtype=torch.bfloat16)
    found = []
    for pipe in (plain, policy.pipe):
        pipe.transformer.condition_embedder.time_embedder.register_forward_hook(lambda *args: found.append(args[2]))
    with torch.no_grad():
        ask(policy, [0.9, 0.3])
        noise, tokens = torch.zeros(2, *policy.shape), torch.zeros(2, 12, plain.transformer.config.text_dim)
        plain.transformer(noise, torch.tensor([900.0, 300.0]), tokens)
    assert policy.pipe.transformer.dtype == torch.bfloat16 and found[0].dtype == torch.float32
    assert torch.allclose(*found, atol=1e-6)
