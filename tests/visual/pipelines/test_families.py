"""What every family of pipelines keeps, on tiny pipelines of the real classes, beside plain diffusers."""

import math

import pytest
import torch
from diffusers.utils import load_image
from tiny_pipelines import one_of_each, tiny

from flowrl import randomness
from flowrl.changes import changed
from flowrl.recipes import find
from flowrl.visual.pipelines import contract
from flowrl.visual.policy import Example
from flowrl.visual.trainer import roll_out
from rewards import media
from rewards.table import RewardTable
from samplers import rollout

PROMPTS = ["a red circle", "two blue squares on the left of a green cross"]
TINY, ONE_OF_EACH = tiny(), one_of_each()
WAYS = [(place, steps, which) for place in (0, 1) for steps in (3, 4) for which in (0, 1)]  # size, steps, guidance
CORNERS = ((0, 3, 1), (1, 4, 0))  # each of both once
EVERY_WAY = [pytest.param(*way, marks=[pytest.mark.slow] * (way not in CORNERS)) for way in WAYS]


def examples_for(name, pictures=()):
    return [Example(p, pictures=pictures if TINY[name].conditioned else ()) for p in PROMPTS]


def noise_of(policy, n, seed=0):
    return policy.noise(n, randomness.generator(seed, "test"))


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """Files of one picture that condition the pipelines that edit."""
    file = tmp_path_factory.mktemp("pictures") / "one.png"
    media.save_png(torch.rand(3, 192, 256, generator=torch.Generator().manual_seed(0)), file)
    return (str(file),)


def finals(policy, examples, noise, steps, guidance):
    policy.guidance = guidance
    ids = policy.encode(examples)
    with torch.no_grad():
        return rollout(policy.velocity, noise, ids, policy.sigmas(steps)).leaves()


def pixels(policy, latents):
    """In 0..1 and not rounded: [N, 3, H, W], of a video [N, F, 3, H, W]."""
    out = (policy.family.decode(latents).float() / 2 + 0.5).clamp(0, 1)
    if out.ndim == 5:
        out = out.transpose(1, 2) if policy.family.frames > 1 else out[:, :, 0]
    return out


def by_diffusers(pipe, policy, examples, noise, steps, guidance):
    """What another copy of the pipeline draws, by one call of it."""
    own = policy.family
    settings = {"size": (own.height, own.width), "frames": own.frames if own.FRAMES else None}
    family = type(own)(pipe, max_sequence_length=own.max_sequence_length, **settings)
    seen = [[load_image(file) for file in e.pictures] for e in examples]
    return contract.drawn(family, [e.prompt for e in examples], noise.clone(), steps, guidance, seen)


@pytest.mark.parametrize(("place", "steps", "which"), EVERY_WAY)
@pytest.mark.parametrize("name", TINY)
def test_the_ode_rollout_draws_what_the_pipeline_draws(policy_of, plain_of, pictures, name, place, steps, which):
    """The same noise gives the same pixels to 1e-4, and they follow the text."""
    size, guidance = TINY[name].sizes[place], TINY[name].guidance[which]
    policy, examples = policy_of(name, size=size), examples_for(name, pictures)
    noise = noise_of(policy, 2)
    latents = finals(policy, examples, noise, steps, guidance)
    theirs = by_diffusers(plain_of(name), policy, examples, noise, steps, guidance)
    ours = pixels(policy, latents)
    assert ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=1e-4), (ours - theirs).abs().max()
    assert theirs.std() > 1e-3 and (theirs[0] - theirs[1]).abs().max() > 1e-3
    swapped = finals(policy, examples[::-1], noise, steps, guidance)
    assert (swapped - latents).abs().max() > 1e-3, "pictures do not follow the text"


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_guidance_changes_what_is_drawn(policy_of, pictures, name):
    policy, examples = policy_of(name), examples_for(name, pictures)
    one, other = (finals(policy, examples, noise_of(policy, 2), 3, g) for g in TINY[name].guidance)
    assert (one - other).abs().max() > 1e-3


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_row_does_not_depend_on_its_batch_nor_on_the_others_sigma(policy_of, pictures, name):
    policy, examples = policy_of(name), examples_for(name, pictures)
    policy.guidance = TINY[name].guidance[1]
    ids, latents, sigma = policy.encode(examples), noise_of(policy, 2), torch.tensor([0.9, 0.3])
    with torch.no_grad():
        both = policy.velocity(latents, sigma, ids)
        each = [policy.velocity(latents[i : i + 1], sigma[i : i + 1], ids[i : i + 1]) for i in range(2)]
    assert (both - torch.cat(each)).abs().max() < 1e-5 * both.abs().max().clamp(min=1)
    assert policy.forwards == 4 * policy.rows_per_state


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_replayed_log_prob_is_the_recorded_one(policy_of, pictures, name):
    """Bit for bit in fp32 at equal shapes; with a bf16 base the ratio stays within 1e-3."""
    for dtype, most in ((torch.float32, 0.0), (torch.bfloat16, 1e-3)):
        policy, recipe = policy_of(name, dtype=dtype), find("flow_grpo")()
        tree, noisy = roll_out(policy, recipe, examples_for(name, pictures)[:1], seed=0, iteration=0, roots=[2])
        step = min(noisy)
        edge = tree.edge[:, step]
        kernel = recipe.rollout.kernel.bound
        source, target = tree.states[tree.source[edge]], tree.states[tree.target[edge]]
        sigma, sigma_next = (tree.sigmas[t].expand(2) for t in (step, step + 1))
        with torch.no_grad():
            velocity = policy.velocity(source, sigma, tree.edge_prompt[edge])
        mean, std = kernel(source, velocity, sigma, sigma_next, tree.sigmas)
        replayed = recipe.rollout.density.bound(target, mean, std)
        assert float((replayed - tree.log_prob[edge]).exp().sub(1).abs().max()) <= most


@pytest.mark.parametrize("name", [each for each in ONE_OF_EACH if TINY[each.values[0]].lora])
def test_a_saved_adapter_does_in_plain_diffusers_what_it_does_here(policy_of, plain_of, pictures, tmp_path, name):
    """C58: effect and strength, with alpha twice the rank."""
    known, policy, examples = TINY[name], policy_of(name), examples_for(name, pictures)
    noise = noise_of(policy, 2)
    start = finals(policy, examples, noise, 3, known.guidance[0])
    with torch.no_grad():
        for key, parameter in policy.trainable():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=randomness.generator(0, key)))
    trained = finals(policy, examples, noise, 3, known.guidance[0])
    assert (trained - start).abs().max() > 1e-3
    policy.save(tmp_path)
    pipe = plain_of(name)
    for network in policy.networks:
        into = {} if network in ("transformer", "unet") else {f"load_into_{network}": True}
        pipe.load_lora_weights(tmp_path / network if into else tmp_path, **into)
    theirs = by_diffusers(pipe, policy, examples, noise, 3, known.guidance[0])
    assert torch.allclose(pixels(policy, trained), theirs, atol=1e-4)
    again = policy_of(name)
    again.load(tmp_path)
    assert torch.equal(finals(again, examples, noise, 3, known.guidance[0]), trained)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_full_weights_are_saved_as_a_pipeline_of_the_same_class(policy_of, plain_of, pictures, tmp_path, name):
    known, policy, examples = TINY[name], policy_of(name, train="full"), examples_for(name, pictures)
    with torch.no_grad():
        for _, parameter in policy.trainable():
            parameter.mul_(1.02)
    noise = noise_of(policy, 2)
    policy.save(tmp_path / "model")
    pipe = plain_of(name, tmp_path / "model")
    theirs = by_diffusers(pipe, policy, examples, noise, 3, known.guidance[0])
    ours = pixels(policy, finals(policy, examples, noise, 3, known.guidance[0]))
    assert torch.allclose(ours, theirs, atol=1e-4)


SMALL = {  # rollouts of a few network calls
    "flow_grpo": {"rollout.steps": 3, "rollout.roots": 2, "rollout.guidance": 1.5},
    "branch_grpo": {"rollout.steps": 3, "rollout.forks": {0: 2, 1: 2}},
    "diffusion_nft": {"rollout.steps": 5, "noising.draws": 3, "rollout.roots": 2},
}


@pytest.mark.parametrize("recipe", SMALL)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_two_updates_move_the_weights(policy_of, pictures, loop, name, recipe):
    """The whole loop on the pipeline: ratio 1 at first, finite numbers, weights that move."""
    recipe = changed(find(recipe)(), SMALL[recipe]).check()
    policy, examples = policy_of(name), examples_for(name, pictures)
    for suffix, rule in recipe.snapshots.items():
        policy.snapshot(suffix, rule, 0)
    learner, before = loop.learner(policy), [p.detach().clone() for _, p in policy.trainable()]
    for iteration in range(2):
        log = loop.update(policy, recipe, learner, iteration, examples=examples, score=redness)
        assert all(math.isfinite(x) for x in log.values() if isinstance(x, float))
        assert log.get("ratio/mean", 1.0) == pytest.approx(1.0, abs=1e-5)
    moved = [float((p - was).detach().abs().max()) for (_, p), was in zip(policy.trainable(), before, strict=True)]
    assert max(moved) > 1e-4


def redness(images, examples, group):
    """Of pictures, and of the frames of a video."""
    value = images.select(-3, 0).flatten(1).mean(1, keepdim=True)
    return RewardTable(value, torch.ones(1), group, torch.ones(len(value), dtype=torch.bool), ("red",))
