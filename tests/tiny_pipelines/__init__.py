"""Tiny random pipelines of diffusers' and transformers' real classes, a module per family.

A module holds `VARIANTS`, {name: Tiny}: what a test needs to know of each.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module

import pytest
import torch
from diffusers import DiffusionPipeline

MODULES = (
    "flux",
    "flux2_klein",
    "flux_kontext",
    "pixart",
    "qwen_image",
    "qwen_image_edit",
    "sana",
    "sd",
    "sd3",
    "sdxl",
    "wan",
    "z_image",
)
ALIKE = {"sd3.5", "flux-schnell", "sd2-v", "qwen-image-edit-2511", "wan-image", "wan2.2-5b"}  # beside another variant


@dataclass(frozen=True)
class Tiny:
    """A pipeline that draws in milliseconds.

    build: () -> the pipeline, of random weights that matter: its pictures change with the text
    """

    build: Callable[[], DiffusionPipeline]
    sizes: tuple[tuple[int, int], tuple[int, int]]
    settings: dict = field(default_factory=dict)  # of opening.load: frames, max_sequence_length
    guidance: tuple[float, float] = (1.0, 4.0)  # without and with
    lora: bool = True
    conditioned: bool = False


def seeded(build: Callable[[], DiffusionPipeline], seed: int = 0) -> Callable[[], DiffusionPipeline]:
    """The same random weights every time, whatever was drawn before."""

    def built():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build()

    return built


def tiny() -> dict[str, Tiny]:
    """All of them by name."""
    found = {}
    for module in MODULES:
        found |= import_module(f"tiny_pipelines.{module}").VARIANTS
    return found


def one_of_each() -> list:
    """Parameters of a test: all names, of which those that differ little from another one's are slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in tiny()]
