"""A pipeline without weights: real classes on the meta device, built from configurations alone.

They come from a folder, whose weights are not read, or from flowrl/visual/architectures: facts of published models.
"""

import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from torch import nn

from flowrl.part import nearest
from flowrl.visual.pipelines import families
from flowrl.visual.pipelines.family import Family
from flowrl.visual.pipelines.folders import quiet, read_index

ARCHITECTURES = Path(__file__).parents[1] / "architectures"
BUILT = ("diffusers", "transformers")  # libraries whose components hold weights, or noise levels


@dataclass(frozen=True)
class Blueprint:
    """A pipeline whose networks are on the meta device, and its family."""

    pipe: DiffusionPipeline
    family: type[Family]


def known() -> list[str]:
    """Names of the published models."""
    return sorted(file.stem for file in ARCHITECTURES.glob("*.json"))


def read(path: Path, adapter: str | None = None) -> Blueprint:
    """That of a pipeline folder, or where there is none, of the published model of its name."""
    if path.is_dir():
        index = read_index(path)
        said, parts = index.pop("_class_name"), {n: x for n, x in index.items() if isinstance(x, list)}
        found = {n: (library, kind, path / n) for n, (library, kind) in parts.items() if library is not None}
        settings = {n: x for n, x in index.items() if n not in parts}
    elif path.name in known():
        page = _page(path.name)
        said, found, settings = page["pipeline"], page["components"], page["settings"]
    else:
        raise ValueError(
            f"model.path = {str(path)!r}: no such folder. {nearest(path.name, known())}Known without their weights: "
            f"{', '.join(known())}."
        )
    quiet()
    family = families.find(said, f"model.path = {str(path)!r}", adapter)
    components = {name: _built(*entry) for name, entry in found.items()}
    accepted = [name for name in family.pipeline().__init__.__annotations__ if name != "return"]
    given = components | {name: x for name, x in settings.items() if name in accepted}
    absent = {name: None for name in accepted if name not in given}
    return Blueprint(family.pipeline()(**absent | given), family)


def _page(name):
    """A published model; where it is said to be `as` another one, what it differs in stands on top of that."""
    page = json.loads((ARCHITECTURES / f"{name}.json").read_text(encoding="utf-8"))
    page = {"settings": {}, **page}
    if "as" not in page:
        return page
    other, components = _page(page["as"]), {}
    for part, entry in (other["components"] | page["components"]).items():
        *kind, config = other["components"].get(part, entry)
        components[part] = entry if isinstance(entry, list) else [*kind, config | entry]
    return {**other, **page, "components": components}


def _built(library, kind, config):
    """A component of a configuration, given or in a folder; a tokenizer, processor or safety checker is left out."""
    if library not in BUILT:
        return None
    made = getattr(import_module(library), kind)
    if hasattr(made, "set_timesteps"):
        return made.from_config(config if isinstance(config, dict) else made.load_config(config))
    if not (isinstance(made, type) and issubclass(made, nn.Module)):
        return None
    with torch.device("meta"):
        if library == "transformers":
            settings = made.config_class
            return made(settings(**config) if isinstance(config, dict) else settings.from_pretrained(config))
        return made.from_config(config if isinstance(config, dict) else made.load_config(config))
