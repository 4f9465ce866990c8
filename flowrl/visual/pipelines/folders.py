"""Pipelines saved to a folder: what is in it, and loading them without noise."""

import json
import re
from pathlib import Path

from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

DISTILLED = re.compile(r"turbo|schnell|lightning|lcm|hyper-?sd|distill|(?<![a-z])dmd", re.IGNORECASE)


def quiet() -> None:
    """Keep what diffusers and transformers print for their own loading loops out of a run's output."""
    for logging in (diffusers_logging, transformers_logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()


def read_index(path: Path, pipeline: str | None = None, setting: str = "model.path") -> dict:
    """model_index.json of a pipeline folder, of the class `pipeline` if given, or one line that says what is wrong."""
    file = path / "model_index.json"
    if not path.is_dir():
        raise ValueError(f"{setting} = {str(path)!r}: no such folder.")
    if not file.is_file():
        raise ValueError(f"{setting} = {str(path)!r} is not a pipeline: it has no model_index.json.")
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{setting} = {str(path)!r} is not a pipeline: its model_index.json is {error}.") from None
    if "_class_name" not in index:
        raise ValueError(f"{setting} = {str(path)!r} is not a pipeline: its model_index.json names no class.")
    if pipeline not in (None, index["_class_name"]):
        raise ValueError(f"{setting} = {str(path)!r} holds a {index['_class_name']}; expected is {pipeline}.")
    return index


def distilled(path: Path) -> str | None:
    """C47: a warning where the name of a model, or of its folder in the hub's cache, says that it is for few steps."""
    name = path.parents[1].name if path.parent.name == "snapshots" else path.name
    if not (found := DISTILLED.search(name)):
        return None
    return (
        f"model {name!r} looks distilled to few steps ({found.group()}): it has no velocity that holds at other "
        "steps, pictures may blur soon. Train the model that it was distilled from, and distil afterwards."
    )
