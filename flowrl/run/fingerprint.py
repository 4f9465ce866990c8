"""What a run was made from, in digests: data files and model, so that a resumed run can tell a changed one."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from flowrl.run import prompts
from flowrl.run.config import resolve
from flowrl.run.settings import Run
from flowrl.visual.pipelines import families

MIB = 2**20
CONTENT = "content"  # of a prompt file, wherever it lies
VALUES = 16  # of each weight of a pipeline in memory
WEIGHTS = (".safetensors", ".bin", ".pt", ".msgpack", ".gguf")


def take(run: Run, texts: Sequence[str] = (), pipe: object = None) -> dict[str, dict[str, str]]:
    """{setting: {file: digest}} of data.train, data.test and model.path.

    texts: prompts in the place of the file data.train
    pipe:  a loaded pipeline in the place of the folder model.path
    """
    train = _digest(prompts.dump(texts).encode()) if texts else of_file(resolve(run.data.train))
    found = {"data.train": {CONTENT: train}}
    if run.data.test:
        found["data.test"] = {CONTENT: of_file(resolve(run.data.test))}
    if pipe is None:
        return found | {"model.path": of_model(resolve(run.model.path))}
    trained = families.find(type(pipe).__name__, adapter=run.model.adapter).NETWORKS
    return found | {"model.path": of_pipeline(pipe, run.model.train, trained)}


def of_file(path: Path) -> str:
    """sha256 of the content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def of_model(folder: Path) -> dict[str, str]:
    """Digests of model_index.json and of every file in the folders of components, by relative path.

    A weight file counts by its size and its first and last MiB: of 20 GB, reading all would take longer than loading.
    """
    inside = [path for path in folder.glob("*/**/*") if path.is_file()]
    files = [path for path in (folder / "model_index.json", *inside) if path.is_file()]
    shown = {path.relative_to(folder).as_posix(): path for path in sorted(files)}
    shown = {name: path for name, path in shown.items() if not any(x.startswith(".") for x in name.split("/"))}
    return {name: of_ends(path) if path.suffix in WEIGHTS else of_file(path) for name, path in shown.items()}


def of_pipeline(pipe: object, train: str, trained: Sequence[str] = ("transformer",)) -> dict[str, str]:
    """Digests of the trained networks' configurations and of the weights that training leaves alone, by component.

    train: "lora" or "full"; with "full" the trained networks' weights are those of the checkpoint, whatever they were
    """
    modules = {name: x for name, x in pipe.components.items() if isinstance(x, nn.Module)}
    found = {}
    for name in (name for name in trained if name in modules):
        config = {key: x for key, x in modules[name].config.items() if not key.startswith("_")}  # _: where it lay
        found[f"{name}, configuration"] = _digest(json.dumps(config, sort_keys=True, default=str).encode())
    frozen = (name for name in modules if train == "lora" or name not in trained)
    return found | {f"{name}, weights": of_weights(modules[name]) for name in frozen}


def of_weights(module: nn.Module) -> str:
    """sha256 of VALUES numbers of each parameter at even distances; a dtype that holds them all changes nothing."""
    picked = [p.detach().flatten()[:: max(p.numel() // VALUES, 1)][:VALUES].cpu().double() for p in module.parameters()]
    return _digest(torch.cat(picked).numpy().tobytes())


def of_ends(path: Path) -> str:
    """Bytes and sha256 of the first and the last MiB."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        first = stream.read(MIB)
        stream.seek(max(size - MIB, 0))
        return f"{size} bytes, {_digest(first + stream.read(MIB))}"


def difference(before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]) -> str | None:
    """The first file that is another now, in words."""
    for setting in (*before, *(name for name in now if name not in before)):
        old, new = before.get(setting, {}), now.get(setting, {})
        for name in sorted(old.keys() | new.keys()):
            was, became = old.get(name, "absent"), new.get(name, "absent")
            if was != became:
                file = "" if name == CONTENT else f" ({name})"
                return f"{setting} has changed since the checkpoint{file}: sha256 {_short(was)} is now {_short(became)}"
    return None


def _short(digest):
    size, _, rest = digest.rpartition(", ")
    return f"{size}, {rest[:12]}" if size else rest[:12]


def _digest(content):
    return hashlib.sha256(content).hexdigest()
