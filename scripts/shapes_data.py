"""What the embedded pipeline is trained on: random training scenes, their pictures and the ids of their prompts."""

import json
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from rewards.shapes_world import KINDS, Scene, all_scenes, metadata, prompt, render, split

SHARES = {"one_object": 0.07, "count": 0.23, "two_objects": 0.25, "position": 0.26, "number": 0.19}


def scenes_of(side: str) -> dict[str, list[Scene]]:
    """Scenes of "train" or "test", by kind."""
    return {kind: [scene for scene in scenes if split(scene) == side] for kind, scenes in all_scenes().items()}


def draw_scenes(count: int, rng: np.random.Generator) -> list[Scene]:
    """Random scenes of the training side: the kind by SHARES, the scene evenly within its kind."""
    scenes = scenes_of("train")
    kinds = rng.choice(KINDS, count, p=[SHARES[kind] for kind in KINDS])
    return [scenes[kind][rng.integers(len(scenes[kind]))] for kind in kinds]


def draw_pictures(count: int, rng: np.random.Generator) -> tuple[UInt8[Tensor, "N 3 32 32"], list[str]]:
    """Pictures of random training scenes, and their prompts."""
    scenes = draw_scenes(count, rng)
    pictures = np.stack([(255 * render(scene, rng) + 0.5).astype(np.uint8) for scene in scenes])
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous(), [prompt(scene) for scene in scenes]


def write_prompts(folder: Path) -> None:
    """Every prompt of the world into train.jsonl or test.jsonl, with its kind and its clauses."""
    for side in ("train", "test"):
        lines = [json.dumps(metadata(scene)) for scenes in scenes_of(side).values() for scene in scenes]
        (folder / f"{side}.jsonl").write_text("\n".join(lines) + "\n")
