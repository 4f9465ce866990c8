"""flowrl/visual/pipelines/folders.py: what a folder says of its pipeline."""

from pathlib import Path

import pytest

from flowrl.visual.pipelines.folders import distilled


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("models/stable-diffusion-3.5-large-turbo", "turbo"),
        ("FLUX.1-schnell", "schnell"),
        ("/cache/models--Tongyi-MAI--Z-Image-Turbo/snapshots/1f2e3d", "Turbo"),
        ("sdxl-DMD2", "DMD"),
    ],
)
def test_a_model_whose_name_says_that_it_is_for_few_steps_is_warned_of(path, word):
    """C47"""
    assert f"({word})" in distilled(Path(path))


@pytest.mark.parametrize("path", ["stable-diffusion-3.5-medium", "turbo/FLUX.1-dev", "assets/shapes", "admd"])
def test_other_models_are_not(path):
    assert distilled(Path(path)) is None
