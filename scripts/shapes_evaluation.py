"""How well the embedded pipeline follows prompts, and the model card that says so."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from jaxtyping import Float
from torch import Tensor

from rewards import shapes
from rewards.shapes_world import KINDS

BATCH = 40  # pictures per call of the pipeline


@dataclass(frozen=True)
class Setting:
    """One way to call the pipeline."""

    name: str
    steps: int = 10
    guidance: float = 1.0
    zero_tokens: int = 0  # max_sequence_length


SETTINGS = (
    Setting("T=10, guidance 1"),
    Setting("T=10, guidance 2", guidance=2.0),
    Setting("T=20, guidance 1", steps=20),
    Setting("T=10, guidance 1, max_sequence_length=256", zero_tokens=256),
)


def generate(
    pipeline: StableDiffusion3Pipeline,
    prompts: list[str],
    setting: Setting,
    seed: int,
) -> Float[Tensor, "N 3 32 32"]:
    """One picture per prompt, in [0, 1]; picture i of a seed starts from the same noise in every setting."""
    noise = torch.Generator().manual_seed(seed)
    sigmas = np.linspace(1, 1 / setting.steps, setting.steps)
    pictures = []
    for start in range(0, len(prompts), BATCH):
        pictures.append(
            pipeline(
                prompts[start : start + BATCH],
                sigmas=sigmas,
                num_inference_steps=setting.steps,
                guidance_scale=setting.guidance,
                max_sequence_length=setting.zero_tokens,
                generator=noise,
                output_type="pt",
            ).images
        )
    return torch.cat(pictures)


def pick(lines: list[dict], per_kind: int, seed: int) -> list[dict]:
    """`per_kind` lines of each kind in random order, repeating a kind that has fewer."""
    rng, picked = np.random.default_rng(seed), []
    for kind in KINDS:
        menu = [line for line in lines if line["tag"] == kind]
        rounds = [rng.permutation(len(menu)) for _ in range(-(-per_kind // len(menu)))]
        picked += [menu[i] for i in np.concatenate(rounds)[:per_kind]]
    return picked


def evaluate(folder: Path, pipeline: StableDiffusion3Pipeline, side: str, per_kind: int, seed: int) -> dict:
    """{setting: {kind or "all": {"strict", "soft"}}} over the prompts of one side; "all" weighs kinds equally."""
    lines = [json.loads(line) for line in (folder / f"{side}.jsonl").read_text().splitlines()]
    lines = pick(lines, per_kind, seed)
    score, table = shapes.load(), {}
    for setting in SETTINGS:
        pictures = generate(pipeline, [line["prompt"] for line in lines], setting, seed)
        marks = score(pictures, [line["include"] for line in lines])
        by_kind = {name: mark.view(len(KINDS), per_kind).mean(1).tolist() for name, mark in marks.items()}
        table[setting.name] = {
            kind: {name: values[i] for name, values in by_kind.items()} for i, kind in enumerate(KINDS)
        }
        table[setting.name]["all"] = {name: sum(values) / len(KINDS) for name, values in by_kind.items()}
    return table


def table_of(results: dict[str, dict]) -> str:
    """Markdown: a row per side and setting, a column per kind, each cell "strict / soft"."""
    columns = ["all", *KINDS]
    rows = ["| prompts | setting | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for side, table in results.items():
        for setting, marks in table.items():
            cells = [f"{marks[column]['strict']:.2f} / {marks[column]['soft']:.2f}" for column in columns]
            rows.append(f"| {side} | {setting} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


CARD = """---
library_name: diffusers
pipeline_tag: text-to-image
---
# shapes: a tiny text-to-image flow model

A trained `StableDiffusion3Pipeline` that draws 32x32 pictures of coloured shapes and numbers, small enough to be
sampled and fine-tuned on a CPU: an SD3 transformer (width 128, 6 layers, 4 heads, 16 latent tokens,
{transformer:.2f} M parameters), two CLIP text encoders ({text_encoder:.2f} M each) with a word-level tokenizer, an
`AutoencoderTiny` ({autoencoder:.2f} M) and `FlowMatchEulerDiscreteScheduler` (shift 1).  Weights are bf16 on disk;
compute in fp32.

```python
pipe = StableDiffusion3Pipeline.from_pretrained(
    "assets/shapes", text_encoder_3=None, tokenizer_3=None, dtype=torch.float32)
pipe("two red circles", sigmas=np.linspace(1, 1 / 10, 10), guidance_scale=1, max_sequence_length=0).images[0]
```

`train.jsonl` and `test.jsonl` hold {train} and {test} prompts with their kind (`tag`) and GenEval-style clauses
(`include`, described in `rewards/shapes_world.py`).  They are split by scene: both wordings of a scene lie on the
same side, and no scene of `test.jsonl` was seen in training.

## Measured

Score of `rewards/shapes.py`, "strict / soft", on {per_kind} pictures of each kind per row, {total} in all; "all" is
the mean over kinds.  Sigmas are `linspace(1, 1/T, T)`; `max_sequence_length` is 0 unless given.  The standard
error of "all" is about {error:.3f} (strict), of one kind at most {kind_error:.2f}.

{table}

## Made

`python scripts/pretrain_shapes.py --out assets/shapes --work WORK --seed {seed} --steps {steps}`: {pictures} rendered
pictures; autoencoder {autoencoder_steps} steps of {autoencoder_batch}; flow matching {steps} steps of {batch}
(logit-normal sigma, 10 % of captions dropped, 25 % of rows with 1 to 256 zero tokens after the text, averaged
weights).  Seconds on two CPU cores: {seconds}.
"""
