"""Checkpoints of a run, written beside and renamed: each is whole, or it is not taken for one.

checkpoints/NNNNNN/, by the number of complete updates, holds the tensors of each of GROUPS by name as safetensors, the
recipe page, and state.json: the facts of the run, and the size and checksum of every other file.  state.json is written
last; a folder without it, or whose files are others than it says, is skipped.
"""

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from flowrl.run.files import sync
from flowrl.run.learner import Learner
from flowrl.run.sharding import in_host_memory, shared_as
from flowrl.visual.policy import Policy

GROUPS = ("weights", "optimizer", "snapshots", "memory")
MARKER = "state.json"
Values = dict[
    str, Tensor | float | int
]  # by name; those of the optimiser and of snapshots as "exp_avg/PARAMETER", "ema/..."


@dataclass(frozen=True)
class Found:
    """A whole checkpoint: its folder and what its state.json says."""

    path: Path
    facts: dict


def capture(
    policy: Policy,
    learner: Learner,
    memory: Mapping[str, Tensor | float | int],
    keep: bool = True,
) -> dict[str, Values]:
    """Copies in host memory of what a run consists of, by group: all that training waits for.

    Every process calls it, because sharded weights are put together; those that do not `keep` get empty groups.
    """
    names = [name for name, _ in policy.trainable()]
    snapshots = {n: dict(zip(names, kept, strict=True)) for n, kept in policy.snapshots.state().items()}
    live = (dict(policy.trainable()), _flat(learner.state()), _flat(snapshots), dict(memory))
    groups = {}
    for group, values in zip(GROUPS, live, strict=True):
        tensors = {name: x.detach() for name, x in values.items() if isinstance(x, Tensor)}
        groups[group] = {n: x for n, x in values.items() if keep and n not in tensors} | in_host_memory(tensors, keep)
    return groups


def restore(groups: Mapping[str, Values], facts: Mapping, policy: Policy, learner: Learner) -> Values:
    """Put weights, snapshots and optimiser back into the objects that exist, no new adapter; returns the memory."""
    load_weights(groups["weights"], policy)
    snapshots = _nested(groups["snapshots"])
    policy.snapshots.restore(
        {n: [shared_as(kept[name], p) for name, p in policy.trainable()] for n, kept in snapshots.items()}
    )
    learner.restore(_nested(groups["optimizer"]), facts["learner"])
    return dict(groups["memory"])


def load_weights(weights: Mapping[str, Tensor], policy: Policy) -> None:
    """Copy weights by name into the parameters; each has to be there, in its shape."""
    live = dict(policy.trainable())
    for name in sorted(live.keys() ^ weights.keys()):
        where = "the model, but not in the checkpoint" if name in live else "the checkpoint, but not in the model"
        raise ValueError(f"parameter {name!r} is in {where}.")
    for name, parameter in live.items():
        if parameter.shape != weights[name].shape:
            raise ValueError(
                f"parameter {name!r} is {tuple(weights[name].shape)} in the checkpoint and {tuple(parameter.shape)} "
                "in the model."
            )
        parameter.data.copy_(shared_as(weights[name], parameter))


def averaged(groups: Mapping[str, Values], snapshot: str) -> dict[str, Tensor]:
    """The weights of a snapshot, by parameter."""
    return _nested(groups["snapshots"])[snapshot]


def write(folder: Path, groups: Mapping[str, Values], facts: Mapping, texts: Mapping[str, str]) -> None:
    """Write folder/NNNNNN, the checkpoint of facts["update"]; until it is whole nothing else is touched.

    texts: files beside the tensors, by name
    """
    name = f"{facts['update']:06d}"
    new, old, final = folder / f".{name}.new", folder / f".{name}.old", folder / name
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for group, values in groups.items():
        save_file({n: x for n, x in values.items() if isinstance(x, Tensor)}, new / f"{group}.safetensors")
    for name, text in texts.items():
        (new / name).write_text(text, encoding="utf-8")
    files = {path.name: _fingerprint(path) for path in sorted(new.iterdir())}
    numbers = {g: {n: x for n, x in values.items() if not isinstance(x, Tensor)} for g, values in groups.items()}
    state = {"format": 1, **facts, "numbers": numbers, "files": files}
    for name in files:
        sync(new / name)
    (new / MARKER).write_text(json.dumps(state, indent=1), encoding="utf-8")
    sync(new / MARKER)
    sync(new)
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    new.rename(final)
    sync(folder)


def read(path: Path) -> dict[str, Values]:
    """The groups of a whole checkpoint."""
    numbers = _state(path)["numbers"]
    stored = {group: load_file(path / f"{group}.safetensors") for group in GROUPS}  # views into files that may go away
    return {g: {n: x.clone() for n, x in values.items()} | numbers[g] for g, values in stored.items()}


def newest(folder: Path) -> tuple[Found | None, list[str]]:
    """(the newest whole checkpoint, by its content and not by its name alone; why newer ones are skipped)."""
    skipped: list[str] = []
    for path in sorted(_candidates(folder), key=_age, reverse=True):
        fault = damage(path) or _changed(path)
        if fault is None:
            return Found(path, _state(path)), skipped
        skipped.append(f"{folder.name}/{path.name} is skipped: {fault}.")
    return None, skipped


def numbered(folder: Path, update: int) -> Found:
    """The whole checkpoint of an update, or a ValueError that names those that are there."""
    path = folder / f"{update:06d}"
    if fault := damage(path) or _changed(path):
        there = ", ".join(str(number(p)) for p in sorted(_candidates(folder)) if damage(p) is None)
        raise ValueError(f"no whole checkpoint of update {update}: {fault}. Checkpoints here: {there or 'none'}.")
    return Found(path, _state(path))


def _state(path):
    return json.loads((path / MARKER).read_text(encoding="utf-8"))


def damage(path: Path) -> str | None:
    """Why a folder is not a whole checkpoint, as far as sizes tell; None if it is."""
    if not path.is_dir():
        return "it is not there"
    if not (path / MARKER).is_file():
        return f"it has no {MARKER}, its writing was interrupted"
    try:
        files = _state(path)["files"]
    except (ValueError, KeyError):
        return f"its {MARKER} is not whole"
    for name, (size, _) in files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if (path / name).stat().st_size != size:
            return f"{name} has {(path / name).stat().st_size} bytes instead of {size}"
    return None


def _changed(path):
    files = _state(path)["files"]
    wrong = next((name for name, entry in files.items() if _fingerprint(path / name) != entry), None)
    return f"{wrong} is damaged, its checksum is another" if wrong else None


def _fingerprint(path):
    """[bytes, sha256] of a file."""
    with path.open("rb") as stream:
        return [path.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest()]


def _candidates(folder):
    """Whatever may hold a checkpoint: also one that is whole and not renamed yet, or that was just being replaced."""
    found = folder.iterdir() if folder.is_dir() else ()
    return [path for path in found if path.is_dir() and re.fullmatch(r"\d{6,}|\.\d{6,}\.(new|old)", path.name)]


def _age(path):
    return number(path), path.name.endswith(".new"), not path.name.startswith(".")


def number(path: Path) -> int:
    """The update of a checkpoint's folder."""
    return int(path.name.strip(".").partition(".")[0])


def _flat(nested):
    return {f"{outer}/{name}": x for outer, values in nested.items() for name, x in values.items()}


def _nested(flat):
    out: dict = {}
    for name, x in flat.items():
        outer, _, inner = name.partition("/")
        out.setdefault(outer, {})[inner] = x
    return out


class Writer:
    """Writes checkpoints in the background, one at a time, and removes old ones once a new one is whole.

    keep: how many of the last ones stay; beside them stays that of the best update
    """

    def __init__(self, folder: Path, keep: int, upto: int):
        """`upto`: the update that the run goes on from; what lies behind it is not of this run any more."""
        self._folder, self._keep = folder, keep
        self._thread: threading.Thread | None = None
        self._fault: Exception | None = None
        here = [path for path in _candidates(folder) if number(path) <= upto and damage(path) is None]
        self._whole = sorted({number(path) for path in here})

    @property
    def newest(self) -> int | None:
        """The update of the last checkpoint that is whole."""
        return self._whole[-1] if self._whole else None

    def save(self, groups: Mapping[str, Values], facts: Mapping, texts: Mapping[str, str], best: int | None) -> None:
        """Start to write the checkpoint of update facts["update"]; waits for the one before, and tells its fault."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(groups, facts, texts, best), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written; RuntimeError if that failed."""
        if self._thread:
            self._thread.join()
        self.check()

    def check(self) -> None:
        """RuntimeError, once, if the last checkpoint could not be written."""
        fault, self._fault = self._fault, None
        if fault is not None:
            raise RuntimeError(str(fault)) from fault

    def _write(self, groups, facts, texts, best):
        update = facts["update"]
        try:
            write(self._folder, groups, facts, texts)
            self._whole = [*(n for n in self._whole if n != update), update]
            self._prune(best)
        except Exception as error:  # safetensors has an exception of its own, and a thread has nobody to tell
            shutil.rmtree(self._folder / f".{update:06d}.new", ignore_errors=True)
            stands = "there is none before it" if self.newest is None else f"{self.newest:06d} is whole"
            said = f"the checkpoint of update {update} could not be written ({error}); {stands}."
            self._fault = RuntimeError(said)

    def _prune(self, best):
        stay = {*self._whole[-self._keep :], best}
        self._whole = [n for n in self._whole if n in stay]
        for path in _candidates(self._folder):
            if number(path) not in stay or path.name.startswith("."):
                shutil.rmtree(path)
