"""Prompt files: .txt with one prompt per line, or .jsonl with "prompt", "negative_prompt", "image" and metadata."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unicodedata import category

from flowrl.visual.policy import Example
from rewards import media


def read(path: Path, setting: str) -> tuple[list[Example], list[str]]:
    """(examples, warnings) of a prompt file; `setting` names it in messages.  Blank lines are left out and counted."""
    if not path.is_file():
        raise ValueError(f"{setting} = {str(path)!r}: no such file.")
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"{setting} = {str(path)!r}: expected a .txt or .jsonl file.")
    try:
        lines = path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{setting} = {str(path)!r} is not UTF-8 text ({error.reason} at byte {error.start})."
        ) from None
    kept = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not kept:
        raise ValueError(f"{setting} = {str(path)!r} holds no prompt.")
    parse = partial(_from_json, path.parent) if path.suffix == ".jsonl" else lambda line, where: Example(line)
    examples = [parse(line, f"{setting} = {str(path)!r}, line {number}") for number, line in kept]
    warnings = []
    if blank := len(lines) - len(kept):
        warnings.append(f"{path.name}: {blank} blank lines left out.")
    if empty := sum(not e.prompt.strip() for e in examples):
        warnings.append(f"{path.name}: {empty} prompts are empty.")
    if odd := [e.prompt for e in examples if any(category(c) == "So" for c in e.prompt)]:
        warnings.append(f"{path.name}: {len(odd)} prompts hold emoji, which most text encoders split into bytes.")
    return examples, warnings


def dump(texts: Sequence[str]) -> str:
    """The content of the .jsonl file of plain prompts."""
    return "".join(json.dumps({"prompt": text}) + "\n" for text in texts)


def with_tags(examples: Sequence[Example], tags: Sequence[str], setting: str) -> list[Example]:
    """The examples whose metadata "tag" is one of `tags`."""
    known = sorted({str(e.metadata["tag"]) for e in examples if "tag" in e.metadata})
    for tag in tags:
        if tag not in known:
            raise ValueError(
                f"{setting}: no prompt has the tag {tag!r}. Tags of the file: {', '.join(known) or 'none'}."
            )
    return [e for e in examples if e.metadata.get("tag") in tags]


def kinds(examples: Sequence[Example]) -> list[list[int]]:
    """Indices of the examples of each tag, in the order of the tags."""
    tags = [str(e.metadata.get("tag")) for e in examples]
    return [[i for i, t in enumerate(tags) if t == tag] for tag in sorted(set(tags))]


def column_names(examples: Sequence[Example]) -> list[str]:
    """Names of the metadata that any example has, in order of appearance."""
    return list(dict.fromkeys(name for e in examples for name in e.metadata))


def columns(examples: Sequence[Example], names: Sequence[str]) -> dict[str, list]:
    """Metadata by name, one entry per example, None where an example has none."""
    return {name: [e.metadata.get(name) for e in examples] for name in names}


def _from_json(folder, line, where):
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg}).") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise ValueError(f'{where}: expected an object with a text "prompt".')
    if not isinstance(entry.get("negative_prompt", ""), str) or not isinstance(entry.get("metadata", {}), dict):
        raise ValueError(f'{where}: "negative_prompt" has to be a text and "metadata" an object.')
    metadata = {**entry, **entry.get("metadata", {})}
    for name in ("prompt", "negative_prompt", "metadata"):
        metadata.pop(name, None)
    pictures = _pictures(metadata.get("image", ()), folder, where)
    return Example(entry["prompt"], entry.get("negative_prompt", ""), metadata, pictures)


def _pictures(given, folder, where):
    """Files of the pictures that are to be edited; their names are relative to the prompt file."""
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f'{where}: "image" has to be the name of a file, or a list of them.')
    files = [folder / name for name in names]
    for file in files:
        try:
            media.check_file(file)
        except ValueError as error:
            raise ValueError(f'{where}: "image" {error}') from None
    return tuple(str(file) for file in files)
