"""FLUX.1 Kontext: pictures of mixed sizes, and how they are resized."""

import pytest
import torch
from diffusers.utils import load_image

from flowrl.visual.policy import Example
from rewards import media

SIDES = {"wide": (128, 256), "square": (192, 192), "high": (384, 128)}  # height, width
ENCODED = {"wide": (640, 1408), "square": (1024, 1024), "high": (1536, 640)}  # of the preferred, multiples of 128


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, generator = tmp_path_factory.mktemp("sizes"), torch.Generator().manual_seed(0)
    for name, (height, width) in SIDES.items():
        media.save_png(torch.rand(3, height, width, generator=generator), folder / f"{name}.png")
    return {name: str(folder / f"{name}.png") for name in SIDES}


def test_three_sizes_in_one_batch_are_all_used(policy_of, spied, files):
    """C78: one call per size, and every row is what it is alone; one prompt comes twice."""
    policy, sigma = policy_of("flux-kontext"), torch.tensor([0.9, 0.7, 0.5, 0.3])
    order = ["wide", "square", "high", "wide"]
    latents = torch.randn(4, *policy.shape, generator=torch.Generator().manual_seed(0))
    ids = policy.encode([Example("a red circle", pictures=(files[name],)) for name in order])
    calls = spied(policy.pipe.transformer)
    with torch.no_grad():
        together = policy.velocity(latents, sigma, ids)
        assert [(len(c.hidden_states), len(c.img_ids)) for c in calls] == [(2, 4 + 55), (1, 4 + 64), (1, 4 + 60)]
        alone = [policy.velocity(latents[i : i + 1], sigma[i : i + 1], ids[i : i + 1]) for i in range(4)]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)
    same_start = latents[:1].expand(3, -1, -1, -1)
    with torch.no_grad():
        drawn = policy.velocity(same_start, sigma[:1].expand(3), ids[:3])
    assert min(float((drawn[i] - drawn[j]).abs().max()) for i, j in ((0, 1), (0, 2), (1, 2))) > 1e-3


@pytest.mark.parametrize("name", SIDES)
def test_a_picture_is_resized_as_the_pipeline_resizes_it(policy_of, plain_of, spied, files, name):
    """To the preferred resolution of the nearest aspect ratio, whatever size is drawn."""
    policy, pipe = policy_of("flux-kontext"), plain_of("flux-kontext")
    ours, theirs = spied(policy.pipe.vae.encoder), spied(pipe.vae.encoder)
    policy.encode([Example("a red circle", pictures=(files[name],))])
    pipe(
        image=load_image(files[name]), prompt="a red circle", num_inference_steps=1, height=256, width=256,
        max_area=256 * 256, max_sequence_length=8, output_type="latent",
    )  # fmt: skip
    assert ours[0].args[0].shape[-2:] == ENCODED[name] and torch.equal(ours[0].args[0], theirs[0].args[0])


def test_the_picture_stands_behind_the_sample(policy_of, spied, files):
    """Its tokens have first coordinate 1 and count for no shift of the noise levels: 2 x 2 patches are drawn."""
    policy = policy_of("flux-kontext")
    calls = spied(policy.pipe.transformer)
    with torch.no_grad():
        out = policy.velocity(
            torch.zeros(1, *policy.shape), torch.ones(1), policy.encode([Example("a", pictures=(files["wide"],))])
        )
    assert calls[0].img_ids[:, 0].tolist() == [0] * 4 + [1] * 55 and out.shape == (1, 4, 4, 4)
    assert float(policy.sigmas(2)[1]) == pytest.approx(0.612384, abs=1e-6)  # mu 0.457 of 4 tokens, not 0.467


@pytest.mark.parametrize(("count", "told"), [(0, "edits pictures"), (2, "edits one picture: .* comes with 2")])
def test_other_than_one_picture_is_refused(policy_of, files, count, told):
    with pytest.raises(ValueError, match=told):
        policy_of("flux-kontext").encode([Example("a red circle", pictures=(files["wide"],) * count)])


def test_a_picture_without_a_patch_is_refused(policy_of, tmp_path):
    media.save_png(torch.rand(3, 100, 200), tmp_path / "low.png")
    with pytest.raises(ValueError, match="200 x 100 pixels: expected 128 or more each way"):
        policy_of("flux-kontext").encode([Example("a red circle", pictures=(str(tmp_path / "low.png"),))])
