"""Statistics of pictures against closed forms: constants, a checkerboard, waves."""

import math

import pytest
import torch

from rewards.statistics import STATISTICS, contrast, high_frequency, measure, saturation, sharpness

SIDE = 32


def grey(y):
    return y.expand(1, 3, SIDE, SIDE)


def checkerboard(amplitude):
    x = torch.arange(SIDE, dtype=torch.double)
    return grey(0.5 + amplitude * (-1) ** (x[:, None] + x))


def wave(amplitude, half_waves):
    """Along the columns, `half_waves` in the picture, without an edge at its border."""
    return amplitude * torch.cos(math.pi * half_waves * (torch.arange(SIDE, dtype=torch.double) + 0.5) / SIDE)


@pytest.mark.parametrize("level", [0.0, 0.3, 1.0])
def test_a_constant_grey_picture_has_none_of_anything(level):
    for name, statistic in STATISTICS.items():
        assert statistic(torch.full((2, 3, 7, 9), level)).tolist() == pytest.approx([0, 0], abs=1e-9), name


def test_a_single_pixel_is_a_picture():
    assert all(statistic(torch.rand(2, 3, 1, 1)).isfinite().all() for statistic in STATISTICS.values())


@pytest.mark.parametrize(
    ("colour", "expected"), [((1, 0, 0), 1.0), ((0.4, 0.2, 0.2), 0.5), ((0, 0, 0), 0.0), ((1, 0.75, 1), 0.25)]
)
def test_saturation_is_that_of_hsv(colour, expected):
    images = torch.tensor(colour, dtype=torch.float)[None, :, None, None].expand(1, 3, 4, 5)
    assert saturation(images).item() == pytest.approx(expected, abs=1e-6)


def test_a_checkerboard_is_all_high_frequency():
    """Its standard deviation is its amplitude, and away from the border its Laplacian eight times that."""
    images = checkerboard(0.25)
    assert high_frequency(images).item() == pytest.approx(1) and contrast(images).item() == pytest.approx(0.25)
    assert (2 * 0.25 * 3) ** 2 < sharpness(images).item() < (8 * 0.25) ** 2


def test_a_wave_has_its_closed_forms():
    """Variance a^2 / 2; its Laplacian is -2 (1 - cos theta) times itself."""
    images = grey(0.5 + wave(0.2, 6))
    assert contrast(images).item() == pytest.approx(0.2 / 2**0.5, rel=1e-6)
    theta = math.pi * 6 / SIDE
    assert sharpness(images).item() == pytest.approx((2 * (1 - math.cos(theta))) ** 2 * 0.02, rel=1e-6)


def test_the_share_above_half_the_nyquist_frequency_is_that_of_the_short_waves():
    """SIDE/2 half waves are four pixels each: just below; energies add up as squares of amplitudes."""
    assert high_frequency(grey(0.5 + wave(0.2, SIDE // 2))).item() == pytest.approx(0, abs=1e-9)
    assert high_frequency(grey(0.5 + wave(0.2, SIDE // 2 + 2))).item() == pytest.approx(1)
    mixed = grey(0.5 + wave(0.3, 4) + wave(0.1, 24))
    assert high_frequency(mixed).item() == pytest.approx(0.1**2 / (0.3**2 + 0.1**2), rel=1e-6)
    assert high_frequency(mixed.mT).item() == pytest.approx(0.1, rel=1e-6)


def test_each_picture_has_its_own_number():
    images = torch.cat([checkerboard(0.1), checkerboard(0.4)]).float()
    assert contrast(images).tolist() == pytest.approx([0.1, 0.4], rel=1e-5)


def test_of_a_video_a_statistic_is_the_mean_over_its_frames():
    videos = torch.rand(2, 4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    each = contrast(videos.flatten(0, 1)).view(2, 4)
    assert torch.equal(measure(contrast, videos), each.mean(1))
    assert torch.equal(measure(contrast, videos[:, 0]), each[:, 0])
