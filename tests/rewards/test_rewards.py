"""Loading rewards by name and scoring a batch with them."""

import subprocess
import sys

import pytest
import torch

import rewards
from rewards import Reward, media, score


def prompt_length(images, prompts, **metadata):
    return [float(len(prompt)) for prompt in prompts]


def brightness(images, *, power=1.0):
    return images.flatten(1).mean(1) ** power


def _score(*loaded, images=None, prompts=("a", "bb", "ccc"), group=(0, 0, 1), **metadata):
    images = torch.full((3, 3, 4, 4), 0.5) if images is None else images
    return score(loaded, images, list(prompts), torch.tensor(group), metadata)


def test_a_built_in_reward_is_loaded_by_its_file_name_with_its_numbers():
    images = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert rewards.load("jpeg_size", quality=10)(images) > rewards.load("jpeg_size")(images)


@pytest.mark.parametrize(
    "name, numbers, message",
    [
        ("jpg_size", {}, "'jpg_size': no such reward. Did you mean 'jpeg_size'. Rewards here: .*clip_score, jpeg_size"),
        ("media", {}, "reward 'media': no such reward"),
        ("jpeg_size", {"qualty": 3}, "'qualty' is not one of its numbers. Did you mean 'quality'. Accepted: quality."),
        ("jpeg_size", {"device_": 3}, "'device_' is not one of its numbers. Accepted: quality."),
        ("no_such_package.file:f", {}, "cannot import 'no_such_package.file': ModuleNotFoundError: No module named"),
        ("rewards.media:to_pill", {}, "media.py has no function 'to_pill'. Did you mean 'to_pil'"),
        ("rewards.media:TOLERANCE", {}, "has no function 'TOLERANCE'"),
        ("rewards.media:", {}, "has no function ''"),
        (prompt_length, {"power": 2}, "'power' is not one of its numbers. Accepted: none."),
        (brightness, {"images": 2}, "'images' is not one of its numbers. Accepted: power."),
    ],
)
def test_a_reward_or_number_that_does_not_exist_is_refused_in_one_line(name, numbers, message):
    with pytest.raises(ValueError, match=message) as refused:
        rewards.load(name, **numbers)
    assert "\n" not in str(refused.value)


def test_a_file_that_fails_at_import_is_named_with_its_fault(tmp_path, monkeypatch):
    (tmp_path / "broken_reward.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"cannot import 'broken_reward': ZeroDivisionError: division by zero"):
        rewards.load("broken_reward:f")


def test_a_function_of_a_users_file_is_loaded_with_its_numbers(tmp_path, monkeypatch):
    (tmp_path / "my_reward.py").write_text("def f(images, *, scale=1):\n    return [scale] * len(images)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert _score(Reward("mine", rewards.load("my_reward:f", scale=3))).value.flatten().tolist() == [3, 3, 3]
    assert _score(Reward("mine", rewards.load("my_reward:f"))).value.flatten().tolist() == [1, 1, 1]


def test_a_function_is_its_own_reward():
    assert rewards.load(brightness) is brightness
    assert rewards.load(brightness, power=2.0)(torch.full((1, 3, 2, 2), 0.5)).item() == pytest.approx(0.25)


def test_a_table_has_a_column_for_each_reward_and_component_in_order():
    shapes = Reward("shapes", lambda images, tag: {"soft": tag, "strict": [0, 1, 0]}, {"strict": 1, "soft": -0.5})
    table = _score(Reward("length", prompt_length, 2), shapes, tag=[1, 2, 3])
    assert table.names == ("length", "shapes_strict", "shapes_soft")
    assert table.value.tolist() == [[1, 0, 1], [2, 1, 2], [3, 0, 3]] and table.value.dtype == torch.float32
    assert table.weight.tolist() == [2, 1, -0.5] and table.group.tolist() == [0, 0, 1] and table.valid.all()
    assert table.total().tolist() == [1.5, 4.0, 4.5]


def test_a_row_is_valid_where_every_reward_scored_it():
    """C04"""
    first = Reward("first", lambda images: [1, None, 1], on_error="mask")
    second = Reward("second", lambda images: [1, 1, float("nan")], on_error="mask")
    with pytest.warns(UserWarning, match="left out"):
        table = _score(first, second)
    assert table.valid.tolist() == [True, False, False]
    assert table.value.tolist() == [[1, 1], [0, 1], [1, 0]]


def test_a_reward_that_returns_one_value_for_three_images_is_refused():
    """C05"""
    with pytest.raises(ValueError, match="reward 'x' returned 1 value for 3 images"):
        _score(Reward("x", lambda images: [1.0]))


def test_a_reward_that_cannot_be_called_is_refused():
    with pytest.raises(ValueError, match=r"reward 'x': parameter 'tags' is not available. Did you mean 'tag'"):
        _score(Reward("x", lambda images, tags: tags), tag=[1, 2, 3])


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"prompts": ["a"]}, "prompts: 1 for 3 images; expected one for each image"),
        ({"tag": [1, 2]}, "tag: 2 for 3 images; expected one for each image"),
        ({"images": torch.rand(3, 3, 4, 4) * 2 - 1}, r"these look like \[-1, 1\]"),
        ({"images": torch.full((3, 3, 4, 4), torch.nan)}, "NaN or infinity in image 0, 1, 2 of 3"),
    ],
)
def test_images_prompts_and_metadata_that_do_not_fit_are_refused(wrong, message):
    """C85"""
    with pytest.raises(ValueError, match=message):
        _score(Reward("x", prompt_length), **wrong)


def test_rewards_without_weight_are_refused():
    """C12"""
    with pytest.raises(ValueError, match="all weights are zero"):
        _score(Reward("x", prompt_length, 0))


def test_the_score_is_the_same_for_pil_uint8_and_float():
    """C85: up to the 8 bits that all of them are rounded to."""
    images = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    tables = [
        _score(Reward("brightness", brightness), images=media.as_images(form))
        for form in (images, media.to_pil(images), media.to_uint8(images))
    ]
    assert torch.equal(tables[0].value, tables[1].value) and torch.equal(tables[0].value, tables[2].value)


def test_a_reward_that_writes_to_its_input_changes_nothing_for_the_next_one():
    def vandal(images, prompts, group, tag):
        images.zero_()
        prompts.clear()
        group.zero_()
        tag.clear()
        return [0, 0, 0]

    images, tag = torch.full((3, 3, 4, 4), 0.5), [1, 2, 3]
    rest = Reward("rest", lambda images, prompts, tag: images.mean((1, 2, 3)) + len(prompts) + len(tag))
    table = _score(Reward("vandal", vandal), rest, images=images, tag=tag)
    assert (table.value[:, 1] > 6.4).all() and table.group.tolist() == [0, 0, 1]
    assert images.min() == 0.5 and tag == [1, 2, 3]


def test_images_of_half_precision_reach_a_reward_as_fp32():
    table = _score(Reward("x", brightness), images=torch.full((3, 3, 4, 4), 0.2, dtype=torch.float16))
    assert table.value.flatten().tolist() == pytest.approx([0.2] * 3)


def test_importing_the_package_loads_no_model_library():
    code = "import rewards, sys; print([m for m in ('open_clip', 'transformers', 'torchvision') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


VIDEOS = torch.arange(12).view(2, 3, 2, 1, 1).repeat_interleave(2, -1)[:, :, :1].expand(2, 3, 3, 1, 2).float() / 255


def first_frame(videos, prompts):
    return videos[:, 0].flatten(1).mean(1) * 255 + torch.tensor([len(p) for p in prompts])


def level(images, prompts, group, tag):
    """A frame's level, and that everything known of its video comes with it."""
    assert len(images) == len(prompts) == len(group) == len(tag) == 6
    assert prompts == ["a"] * 3 + ["bb"] * 3 and group.tolist() == [4] * 3 + [7] * 3 and tag == [None] * 3 + ["t"] * 3
    return {"level": images[:, 0].flatten(1).mean(1) * 255, "index": torch.arange(6.0)}


def test_a_reward_on_videos_sees_them_whole_and_one_on_images_the_mean_over_frames():
    loaded = [Reward("first", first_frame), Reward("each", level, {"level": 1.0, "index": 2.0})]
    table = score(loaded, None, ["a", "bb"], torch.tensor([4, 7]), {"tag": [None, "t"]}, videos=VIDEOS)
    assert table.names == ("first", "each_level", "each_index") and bool(table.valid.all())
    assert table.value.tolist() == [[1.0, 2.0, 1.0], [8.0, 8.0, 4.0]]


def test_a_video_with_a_frame_that_cannot_be_scored_is_invalid():
    def broken(images):
        return [float("nan") if i == 4 else 1.0 for i in range(len(images))]

    with pytest.warns(UserWarning, match="1 of 6 values"):
        table = score([Reward("b", broken, on_error="mask")], None, "ab", torch.tensor([0, 1]), {}, videos=VIDEOS)
    assert table.valid.tolist() == [True, False]


def test_a_reward_that_knows_both_takes_videos_as_they_are():
    def both(images=None, videos=None):
        assert images is None
        return videos.flatten(1).mean(1)

    table = score([Reward("both", both)], None, "ab", torch.tensor([0, 1]), {}, videos=VIDEOS)
    assert (255 * table.value[:, 0]).tolist() == pytest.approx([2, 8])


def test_a_reward_on_videos_is_not_given_pictures():
    with pytest.raises(ValueError, match=r"reward 'first' asks for videos; there are only images"):
        _score(Reward("first", first_frame))
