"""Minus the kilobytes of an image as a JPEG."""

import pytest
import torch

from rewards import media
from rewards.jpeg_size import load


@pytest.fixture
def images():
    noise = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))
    return media.quantise(torch.stack([torch.full((3, 32, 32), 0.5), noise]))


def test_a_plain_image_scores_higher_than_noise(images):
    plain, noisy = load()(images).tolist()
    assert noisy < plain < 0
    assert noisy == pytest.approx(-len(media.jpeg_bytes(images[1], 95)) / 1000)


def test_the_score_is_the_same_for_pil_uint8_and_float(images):
    """C85"""
    forms = [media.to_pil(images), media.to_uint8(images), images]
    scores = [load()(media.as_images(form)) for form in forms]
    assert torch.equal(scores[0], scores[1]) and torch.equal(scores[0], scores[2])


def test_an_image_scores_the_same_alone_and_in_any_order(images):
    score = load()
    both = score(images)
    assert torch.equal(score(images.flip(0)), both.flip(0)) and torch.equal(score(images[1:]), both[1:])


def test_lower_quality_is_smaller(images):
    assert load(quality=20)(images[1:]) > load(quality=95)(images[1:])


@pytest.mark.parametrize("quality", [0, 101])
def test_a_quality_that_jpeg_does_not_have_is_refused(quality):
    with pytest.raises(ValueError, match=f"reward 'jpeg_size': quality is {quality}; expected a whole number from 1"):
        load(quality=quality)
