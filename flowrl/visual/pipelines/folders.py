"""Pipelines saved to a folder: what is in it, and loading them without noise."""

import json
from pathlib import Path

from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging


def quiet() -> None:
    """Keep what diffusers and transformers print for their own loading loops out of a run's output."""
    for logging in (diffusers_logging, transformers_logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()


def read_index(path: Path, setting: str = "model.path") -> dict:
    """model_index.json of a pipeline folder, or one line that says what is not there."""
    file = path / "model_index.json"
    if not path.is_dir():
        raise ValueError(f"{setting} = {str(path)!r}: no such folder.")
    if not file.is_file():
        raise ValueError(f"{setting} = {str(path)!r} is not a pipeline: it has no model_index.json.")
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{setting} = {str(path)!r} is not a pipeline: its model_index.json is {error}.") from None
    if index.get("_class_name") != "StableDiffusion3Pipeline":
        raise ValueError(
            f"{setting} = {str(path)!r} holds a {index.get('_class_name')}; accepted is StableDiffusion3Pipeline."
        )
    return index
