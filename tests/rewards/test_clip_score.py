"""CLIP's cosine from local weights: right numbers, and no plausible wrong ones."""

import json
import sys

import open_clip
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from rewards import load, media
from rewards.clip_score import _preprocessing

TINY = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8},
    "text_cfg": {"context_length": 10, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
VARIANTS = {
    "tiny": TINY,
    "tiny-quickgelu": TINY | {"quick_gelu": True},
    "tiny-wide": TINY | {"vision_cfg": TINY["vision_cfg"] | {"width": 32}},
    "tiny-long": TINY | {"text_cfg": TINY["text_cfg"] | {"context_length": 12}},
    "tiny-hub": TINY | {"text_cfg": TINY["text_cfg"] | {"hf_tokenizer_name": "somewhere/else"}},
}
PROMPTS = ["a red cube", "a blue ball", "a red cube"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder of tiny random weights, known to open_clip under the names of VARIANTS."""
    folder = tmp_path_factory.mktemp("clip")
    for name, config in VARIANTS.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
        open_clip.add_model_config(folder / f"{name}.json")
    torch.manual_seed(0)
    state = open_clip.CLIP(**TINY).state_dict()
    save_file(state, folder / "tiny.safetensors")
    torch.save({"state_dict": {f"module.{key}": value for key, value in state.items()}, "epoch": 3}, folder / "tiny.pt")
    return folder


@pytest.fixture(scope="module")
def images():
    return media.quantise(torch.rand(3, 3, 20, 28, generator=torch.Generator().manual_seed(0)))


def _manual(models, images, prompts):
    """The same cosine with open_clip's own preprocessing of PIL images, and the projections written out."""
    clip = open_clip.CLIP(**TINY).eval()
    clip.load_state_dict(load_file(models / "tiny.safetensors"))
    transform = open_clip.image_transform(16, is_train=False)
    with torch.no_grad():
        image = clip.visual(torch.stack([transform(picture) for picture in media.to_pil(images)]))
        tokens = open_clip.SimpleTokenizer(context_length=10)(prompts)
        hidden = clip.token_embedding(tokens) + clip.positional_embedding
        hidden = clip.ln_final(clip.transformer(hidden, attn_mask=clip.attn_mask))
        text = hidden[torch.arange(len(tokens)), tokens.argmax(1)] @ clip.text_projection
    return torch.cosine_similarity(image, text)


def test_the_score_is_the_cosine_of_the_two_projections(models, images):
    """C81, C84: the PIL route rounds to 8 bits after resizing, so it agrees to a few thousandths."""
    scores = load("clip_score", model="tiny", weights=models / "tiny.safetensors")(images, PROMPTS)
    assert scores.shape == (3,) and scores.abs().max() <= 1
    torch.testing.assert_close(scores, _manual(models, images, PROMPTS), rtol=0, atol=0.004)


def test_an_image_of_the_models_size_gives_the_projection_exactly(models, images):
    """C84"""
    small = images[:, :, :16, :16].contiguous()
    scores = load("clip_score", model="tiny", weights=models / "tiny.safetensors")(small, PROMPTS)
    torch.testing.assert_close(scores, _manual(models, small, PROMPTS), rtol=0, atol=1e-6)


def test_the_tensor_path_resizes_as_pillow_does(images):
    """C84: one level of 8 bits at most; bicubic, antialiased, saturating, the short side to 16, the centre cut out."""
    hard = (images > 0.5).float()
    numbers = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
    transform = open_clip.image_transform(16, is_train=False, **numbers)
    expected = torch.stack([transform(picture) for picture in media.to_pil(hard)])
    torch.testing.assert_close(_preprocessing(16, numbers)(hard), expected, rtol=0, atol=1 / 255 / 0.2)


def test_scores_do_not_depend_on_batch_size_order_or_kind_of_file(models, images):
    score = load("clip_score", model="tiny", weights=str(models / "tiny.safetensors"))
    small = load("clip_score", model="tiny", weights=models / "tiny.pt", batch_size=2)
    torch.testing.assert_close(small(images, PROMPTS), score(images, PROMPTS))
    torch.testing.assert_close(score(images.flip(0), PROMPTS[::-1]), score(images, PROMPTS).flip(0))


def test_without_weights_the_file_to_give_is_named(tmp_path):
    with pytest.raises(ValueError, match="weights is None; give the path of an open_clip checkpoint of 'ViT-B-32'"):
        load("clip_score")
    with pytest.raises(ValueError, match=r"weights is 'laion2b_s34b_b79k'; give the path .*\(nothing is downloaded"):
        load("clip_score", weights="laion2b_s34b_b79k")


@pytest.mark.parametrize(
    "name, message",
    [
        ("tyny", "no such model 'tyny'. Did you mean 'tiny'. Models with .*ViT-B-32"),
        ("tiny-hub", "no such model 'tiny-hub'"),
        (
            "tiny-wide",
            r"does not fit model 'tiny-wide': \d+ of \d+ tensors differ, first visual.* \(\[16\], not \[32\]\)",
        ),
        ("tiny-long", r"1 of \d+ tensors differ, first positional_embedding \(\[10, 16\], not \[12, 16\]\)"),
    ],
)
def test_weights_of_another_model_or_context_length_are_refused(models, name, message):
    """C84"""
    with pytest.raises(ValueError, match=message) as refused:
        load("clip_score", model=name, weights=models / "tiny.safetensors")
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_a_plain_state_dict_is_refused(models, tmp_path):
    torch.save({"model": Image.new("RGB", (2, 2))}, tmp_path / "pickled.pt")
    (tmp_path / "cut.safetensors").write_bytes((models / "tiny.safetensors").read_bytes()[:1000])
    for file in ("pickled.pt", "cut.safetensors"):
        with pytest.raises(ValueError, match=f"{file}' is not a readable file of tensors"):
            load("clip_score", model="tiny", weights=tmp_path / file)


def test_the_config_beside_the_weights_sets_mean_and_std_and_refuses_another_activation(models, images, tmp_path):
    """C84: a state dict alone does not tell QuickGELU from GELU."""
    path = tmp_path / "open_clip_model.safetensors"
    path.write_bytes((models / "tiny.safetensors").read_bytes())
    numbers = {"mean": [0.0] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "resize_mode": "squash", "size": 16}
    config = {"model_cfg": VARIANTS["tiny-quickgelu"], "preprocess_cfg": numbers}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"model 'tiny' has quick_gelu=False, the weights True .*config.json"):
        load("clip_score", model="tiny", weights=path)
    quick = load("clip_score", model="tiny-quickgelu", weights=path)(images, PROMPTS)
    other = load("clip_score", model="tiny-quickgelu", weights=models / "tiny.safetensors")(images, PROMPTS)
    assert not torch.allclose(quick, other, atol=1e-4)


def test_resizing_that_is_not_known_is_refused():
    numbers = {"mean": [0.0] * 3, "std": [1.0] * 3, "resize_mode": "longest"}
    with pytest.raises(ValueError, match="resizing 'longest', 'bicubic'; accepted: shortest, squash, bicubic"):
        _preprocessing(16, numbers)


def test_prompts_that_are_too_long_are_cut_counted_and_said_once(models, images):
    score = load("clip_score", model="tiny", weights=models / "tiny.safetensors")
    long = "a " * 9
    with pytest.warns(UserWarning, match="2 of 3 prompts exceed 10 tokens; scored on the first 10") as warned:
        cut = score(images, [long, long, "a"])
        score(images, [long, long, "a"])
    assert len(warned) == 1
    torch.testing.assert_close(cut, _manual(models, images, ["a " * 8, "a " * 8, "a"]), rtol=0, atol=0.004)


def test_a_foreign_package_called_clip_changes_nothing(models, images, tmp_path, monkeypatch):
    """C79"""
    (tmp_path / "clip.py").write_text("raise RuntimeError('a clipboard manager')\n")
    monkeypatch.syspath_prepend(tmp_path)
    load("clip_score", model="tiny", weights=models / "tiny.safetensors")(images, PROMPTS)
    assert "clip" not in sys.modules
