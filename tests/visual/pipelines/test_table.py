"""The README's table of families.  Run as a script, with .:tests:scripts on PYTHONPATH, it measures and prints it."""

import re
import tempfile
from pathlib import Path

import pytest
import torch
from tiny_pipelines import tiny

from flowrl.visual.contract import ratio_replayed
from flowrl.visual.pipelines import opening
from flowrl.visual.pipelines.contract import pictures_apart
from flowrl.visual.pipelines.families import FAMILIES, find
from flowrl.visual.policy import Example

README = Path(__file__).parents[3] / "README.md"
HEAD = "| diffusers class | text to image | edit | video | LoRA | full | parity | ratio |"
PROMPTS = ("a red circle", "two blue squares on the left of a green cross")
YES, NO = "yes", ""


def kind(known):
    return type(known.build()).__name__


def abilities(pipeline, lora):
    """The cells of a family that are no measurements."""
    family = find(pipeline)
    video = family.FRAMES is not None
    return [YES if x else NO for x in (not family.CONDITIONED, family.CONDITIONED, video, lora, True)]


def measured(folder, known, pictures):
    """(pixels apart from the pipeline's own in fp32, ratio's distance from 1 with a bf16 base), the largest found."""
    apart = []
    examples = [Example(p, pictures=pictures if known.conditioned else ()) for p in PROMPTS]
    for dtype in (torch.float32, torch.bfloat16):
        rank, cpu = (4 if known.lora else 0), torch.device("cpu")
        settings = known.settings | {"size": known.sizes[0], "alpha": 8.0}
        policy = opening.load(folder, dtype=dtype, device=cpu, rank=rank, **settings)
        if dtype == torch.float32:
            apart.append(max(pictures_apart(policy, examples, steps=4, guidance=g) for g in known.guidance))
        else:
            apart.append(ratio_replayed(policy, examples))
    return apart


def rows():
    """The table's rows, by class."""
    from rewards import media

    found = {}
    with tempfile.TemporaryDirectory() as place:
        picture = Path(place) / "one.png"
        media.save_png(torch.rand(3, 192, 256, generator=torch.Generator().manual_seed(0)), picture)
        for name, known in tiny().items():
            pipe = known.build()
            pipe.save_pretrained(Path(place) / name)
            apart = measured(Path(place) / name, known, (str(picture),))
            lora, worst = found.get(type(pipe).__name__, (False, [0.0, 0.0]))
            found[type(pipe).__name__] = lora or known.lora, [max(pair) for pair in zip(worst, apart, strict=True)]
    return [
        f"| `{name}` | {' | '.join([*abilities(name, lora), *(f'{x:.0e}' for x in worst)])} |"
        for name, (lora, worst) in sorted(found.items())
    ]


def printed():
    """{class: cells} of the README."""
    lines = README.read_text(encoding="utf-8").split(HEAD)[1].split("\n\n")[0].splitlines()[2:]
    return {(cells := [c.strip() for c in re.split(r"\|", line)[1:-1]])[0].strip("`"): cells[1:] for line in lines}


@pytest.mark.parametrize("pipeline", FAMILIES)
def test_the_readme_says_what_each_family_can_and_how_near_it_is(pipeline):
    *said, parity, ratio = printed()[pipeline]
    assert said == abilities(pipeline, any(known.lora for known in tiny().values() if kind(known) == pipeline))
    assert float(parity) <= 1e-4 and float(ratio) <= 1e-3


def test_the_readme_names_no_other_family():
    assert printed().keys() == FAMILIES.keys()


if __name__ == "__main__":
    print(f"{HEAD}\n|{' --- |' * 8}")
    print("\n".join(rows()))
