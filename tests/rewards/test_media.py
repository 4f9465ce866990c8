"""Conversions of pictures: what goes out comes back, and what is not an image in [0, 1] is refused."""

from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from rewards import media


@pytest.fixture
def images():
    return torch.rand(3, 3, 8, 12, generator=torch.Generator().manual_seed(0))


def test_pil_uint8_and_float_of_one_picture_are_the_same_images(images):
    """C85"""
    levels = media.to_uint8(images)
    forms = [media.to_pil(images), levels, torch.from_numpy(levels), media.quantise(images)]
    for form in forms:
        torch.testing.assert_close(media.as_images(form), media.quantise(images), rtol=0, atol=0)


def test_red_stays_red_and_rows_stay_rows():
    """C85: neither BGR nor transposed."""
    image = torch.zeros(3, 4, 6)
    image[0, 1, 5] = 1
    picture = media.to_pil(image)
    assert picture.size == (6, 4) and picture.getpixel((5, 1)) == (255, 0, 0)
    assert media.to_uint8(image[None])[0, 1, 5].tolist() == [255, 0, 0]
    assert torch.equal(media.from_pil([picture])[0], image)


def test_quantise_is_at_most_half_a_level_away_and_does_nothing_twice(images):
    once = media.quantise(images)
    assert (once - images).abs().max() <= 0.5 / 255 + 1e-7
    assert torch.equal(media.quantise(once), once) and once.data_ptr() != images.data_ptr()


@pytest.mark.parametrize(
    "images, message",
    [
        (torch.rand(2, 3, 4, 4) * 2 - 1, r"expected \[0, 1\]; these look like \[-1, 1\]: give images / 2 \+ 0.5"),
        (torch.full((2, 3, 4, 4), 255.0), "values from 255 to 255.*these look like 0..255: give images / 255"),
        (torch.full((2, 3, 4, 4), 1.002), r"values from 1.002 to 1.002; expected \[0, 1\]$"),
        (torch.rand(3, 4, 4), r"float32 \[3, 4, 4\]; expected float \[N, 3, H, W\]"),
        (torch.rand(2, 4, 4, 3), r"\[2, 4, 4, 3\]; expected float \[N, 3, H, W\]"),
        (torch.rand(2, 1, 4, 4), r"\[2, 1, 4, 4\]; expected"),
        (torch.rand(0, 3, 4, 4), "N >= 1"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), "uint8"),
    ],
)
def test_images_of_another_range_or_layout_are_refused(images, message):
    """C85"""
    with pytest.raises(ValueError, match=message):
        media.check_images(images)


def test_nan_is_refused_with_the_index_of_its_image():
    images = torch.zeros(9, 3, 4, 4)
    images[1:8, 2, 3, 3] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinity in image 1, 2, 3, 4, 5 and 2 more of 9"):
        media.check_images(images)


def test_a_decoder_may_round_by_a_thousandth():
    images = torch.tensor([-0.0005, 1.0005]).expand(1, 3, 2, 2)
    media.check_images(images)
    assert media.quantise(images).unique().tolist() == [0, 1]


@pytest.mark.parametrize(
    "given, message",
    [
        ([], "given list; accepted: a list of PIL images, uint8"),
        (Image.new("RGB", (4, 4)), "given Image; accepted"),
        (np.zeros((2, 4, 4, 3)), "given float64 array; accepted"),
        (np.zeros((2, 3, 4, 4), np.uint8), r"uint8 \[2, 3, 4, 4\]; expected uint8 \[N, H, W, 3\]"),
        ([Image.new("RGB", (4, 4)), Image.new("RGB", (4, 5))], r"sizes \[\(4, 4\), \(4, 5\)\]"),
        ([Image.new("RGBA", (4, 4))], "transparency"),
        (torch.rand(2, 3, 4, 4) - 1, "look like"),
    ],
)
def test_what_is_not_a_batch_of_pictures_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        media.as_images(given)


def test_a_grey_picture_becomes_rgb():
    assert media.as_images([Image.new("L", (2, 2), 51)]).unique().tolist() == pytest.approx([0.2])


def test_half_precision_images_convert():
    assert media.to_uint8(torch.full((1, 3, 2, 2), 0.5, dtype=torch.bfloat16)).max() == 128


def test_png_bytes_are_the_pixels_and_no_larger_than_asked(images):
    """Shrunk with its proportions kept; never enlarged."""
    same = Image.open(BytesIO(media.png_bytes(images[0], 1000)))
    assert torch.equal(media.from_pil([same])[0], media.quantise(images[:1])[0])
    assert Image.open(BytesIO(media.png_bytes(torch.rand(3, 20, 40), 10))).size == (10, 5)


def test_jpeg_bytes_are_a_jpeg_and_grow_with_quality(images):
    low, high = (media.jpeg_bytes(images[0], quality) for quality in (10, 95))
    assert low[:2] == b"\xff\xd8" and len(low) < len(high)


def test_a_grid_shows_each_image_enlarged_and_in_reading_order():
    images = torch.stack([torch.full((3, 2, 2), level) for level in (0.0, 0.2, 0.4)])
    grid = media.picture_grid(images, columns=2, scale=3, gap=1)
    assert grid.size == (13, 13)
    at = [grid.getpixel(corner)[0] for corner in ((0, 0), (5, 5), (7, 0), (12, 5), (0, 7), (7, 7), (6, 0))]
    assert at == [0, 0, 51, 51, 102, 255, 255]


def test_a_grid_of_no_columns_is_refused(images):
    with pytest.raises(ValueError, match="columns=0, scale=1, gap=2; expected >= 1"):
        media.picture_grid(images, columns=0)


def test_a_saved_png_holds_the_quantised_image(images, tmp_path):
    media.save_png(images[0], tmp_path / "one.png")
    media.save_png(media.to_pil(images[0]), tmp_path / "two.png")
    for name in ("one.png", "two.png"):
        assert torch.equal(media.from_pil([Image.open(tmp_path / name)]), media.quantise(images[:1]))


def test_videos_are_checked_as_images_are_and_the_broken_one_is_named():
    videos = torch.rand(3, 2, 3, 4, 4)
    media.check_videos(videos)
    videos[1, 1, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"^videos: NaN or infinity in video 1 of 3$"):
        media.check_videos(videos)
    with pytest.raises(ValueError, match=r"^videos: values from -1 to -1; .*give videos / 2 \+ 0\.5$"):
        media.check_videos(-torch.ones(1, 2, 3, 4, 4))
    with pytest.raises(ValueError, match=r"^videos: torch.float32 \[3, 3, 4, 4\]; expected float \[N, F, 3, H, W\]"):
        media.check_videos(torch.rand(3, 3, 4, 4))


def test_the_still_of_a_video_is_the_frame_in_the_middle(images):
    videos = torch.arange(5.0).view(1, 5, 1, 1, 1).expand(2, 5, 3, 4, 6) / 8
    assert torch.equal(media.stills(videos), torch.full((2, 3, 4, 6), 2 / 8)) and media.stills(images) is images


def test_a_file_of_frames_plays_all_of_them_for_ever_at_sixteen_a_second(tmp_path):
    shades = [0, 100, 200]
    media.save_moving([Image.new("RGB", (6, 4), (x, 0, 0)) for x in shades], tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as file:
        assert file.format == "PNG" and file.n_frames == 3 and file.info["loop"] == 0
        assert file.info["duration"] == 1000 / 16
        for i, shade in enumerate(shades):
            file.seek(i)
            assert file.convert("RGB").getpixel((0, 0)) == (shade, 0, 0)
