"""Qwen-Image-Edit-Plus: pictures of several sizes and numbers, read twice."""

import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus
from diffusers.utils import load_image
from tiny_pipelines import tiny

from flowrl import randomness
from flowrl.visual.pipelines import contract
from flowrl.visual.pipelines.qwen_image_edit import QwenImageEditPlus
from flowrl.visual.policy import Example
from rewards import media
from samplers import rollout

NAME = "qwen-image-edit-2511"
SIZES = {"square": (32, 32), "wide": (20, 40), "tall": (40, 20)}  # of 64 x 64 pixels: 64 x 64, 32 x 96, 96 x 32


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """name -> picture (height, width) of noise of its own."""
    folder, generator = tmp_path_factory.mktemp("sizes"), torch.Generator().manual_seed(1)
    found = {}
    for name, size in SIZES.items():
        found[name] = str(folder / f"{name}.png")
        media.save_png(torch.rand(3, *size, generator=generator), folder / f"{name}.png")
    return found


def drawn(policy, examples, noise, guidance=3.0, steps=3):
    policy.guidance = guidance
    ids = policy.encode(examples)
    with torch.no_grad():
        return rollout(policy.velocity, noise, ids, policy.sigmas(steps)).leaves()


def noise_of(policy, n):
    return policy.noise(n, randomness.generator(0, "test"))


def test_three_sizes_in_one_batch_are_all_used(policy_of, plain_of, files, spied):
    """A call per size, rows back in their places, every one as the pipeline draws it alone; two of one size share."""
    policy, order = policy_of(NAME), ("wide", "square", "wide", "tall")
    examples = [Example(f"a {name} circle", pictures=(files[name],)) for name in order]
    noise, calls = noise_of(policy, 4), spied(policy.pipe.transformer)
    ours = policy.family.decode(drawn(policy, examples, noise)) / 2 + 0.5
    shapes = [[(1, 4, 4), (1, 4, 12)], [(1, 4, 4), (1, 8, 8)], [(1, 4, 4), (1, 12, 4)]]
    assert [call.img_shapes for call in calls] == [[shapes[0]] * 4, [shapes[1]] * 2, [shapes[2]] * 2] * 3
    seen = [[load_image(files[name])] for name in order]
    theirs = contract.drawn(
        QwenImageEditPlus(plain_of(NAME), size=(32, 32)), [e.prompt for e in examples], noise.clone(), 3, 3.0, seen
    )
    assert torch.allclose(ours.clamp(0, 1), theirs, atol=1e-4), (ours - theirs).abs().max()
    for i, name in enumerate(order):
        other = files["tall" if name == "square" else "square"]
        examples[i] = Example(examples[i].prompt, pictures=(other,))
    changes = policy.family.decode(drawn(policy, examples, noise)) / 2 + 0.5 - ours
    assert bool((changes.flatten(1).abs().amax(1) > 1e-3).all()), "a picture is not used"


def test_two_pictures_of_two_sizes_are_the_pipelines_in_their_order(policy_of, plain_of, files, spied):
    policy, latents = policy_of(NAME), {}
    noise, calls = noise_of(policy, 1), spied(policy.pipe.transformer)
    for pair in (("wide", "tall"), ("tall", "wide"), ("wide",)):
        example = Example("both in one", pictures=tuple(files[name] for name in pair))
        latents[pair] = drawn(policy, [example], noise)
    assert calls[0].img_shapes[0] == [(1, 4, 4), (1, 4, 12), (1, 12, 4)]
    pair = ("wide", "tall")
    seen = [[load_image(files[name]) for name in pair]]
    theirs = contract.drawn(
        QwenImageEditPlus(plain_of(NAME), size=(32, 32)), ["both in one"], noise.clone(), 3, 3.0, seen
    )
    ours = (policy.family.decode(latents[pair]) / 2 + 0.5).clamp(0, 1)
    assert torch.allclose(ours, theirs, atol=1e-4)
    for other in (("tall", "wide"), ("wide",)):
        assert (latents[other] - latents[pair]).abs().max() > 1e-3


def test_pictures_go_to_the_text_encoder_and_to_the_autoencoder(policy_of, files):
    """Two halves of what is encoded change with the picture: tokens of the text, latents of 1/4 of a side."""
    family = policy_of(NAME).family
    one, other = (family.encode("a", [load_image(files[name])], torch.device("cpu")) for name in ("wide", "tall"))
    assert one["picture 0"].shape == (4, 8, 24) and other["picture 0"].shape == (4, 24, 8)
    assert one["tokens"].shape == other["tokens"].shape
    assert (one["tokens"] - other["tokens"]).abs().max() > 1e-3
    assert family.bucket(one) == ((4, 8, 24),) != family.bucket(other)


def test_pictures_have_the_pipelines_numbers_of_pixels(monkeypatch, files):
    """In multiples of 32, 1:2 is 736 x 1440 of 1024 x 1024 for the autoencoder, 256 x 544 of 384 x 384 for the text."""
    monkeypatch.setattr(plus, "VAE_IMAGE_SIZE", 1024 * 1024)
    monkeypatch.setattr(plus, "CONDITION_IMAGE_SIZE", 384 * 384)
    pipe, sizes = tiny()[NAME].build(), []

    def encode_vae_image(pixels, generator):
        sizes.append(tuple(pixels.shape[-2:]))
        return torch.zeros(1, 4, 1, 8, 8)

    def encode_prompt(prompt, image, device):
        sizes.extend((picture.height, picture.width) for picture in image)
        return torch.zeros(1, 3, 16), None

    monkeypatch.setattr(pipe, "_encode_vae_image", encode_vae_image)
    monkeypatch.setattr(pipe, "encode_prompt", encode_prompt)
    QwenImageEditPlus(pipe, size=32).encode("a", [load_image(files["wide"])], torch.device("cpu"))
    assert sizes == [(736, 1440), (256, 544)]


@pytest.mark.parametrize("given", [True, False], ids=["with", "without"])
def test_a_prompt_comes_with_pictures_where_they_are_read(policy_of, files, given):
    policy = policy_of("qwen-image" if given else NAME)
    with pytest.raises(ValueError, match="takes no picture" if given else "edits pictures"):
        policy.encode([Example("a red circle", pictures=(files["wide"],) if given else ())])


def test_no_prompt_is_too_long(policy_of, files):
    policy = policy_of(NAME)
    long = Example("!" * 1200, pictures=(files["wide"],))
    assert policy.warnings([long]) == []
    policy.encode([long])
    assert min(len(text["tokens"]) for _, text in policy._texts.items()) > 1200
    with pytest.raises(ValueError, match="max_sequence_length = 64 has no effect"):
        policy_of(NAME, max_sequence_length=64)
