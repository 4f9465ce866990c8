"""Where else the log of a run goes: TensorBoard and wandb, each by its own API.

A tracker is three calls (`Tracker`).  None may end a run: what one raises is told once, and it is asked again at the
next update.  metrics.jsonl and samples/ are written before, and hold all that a tracker is told.
"""

import os
import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from flowrl.run.packages import installed

EXTRA = "pip install 'flowrl[track]'"


class Tracker(Protocol):
    def scalars(self, values: Mapping[str, float], update: int) -> None: ...
    def picture(self, path: Path, update: int) -> None: ...  # a PNG that is on the disk
    def close(self) -> None: ...


class TensorBoard:
    """Event files in RUN_DIR/tensorboard; from update `first` on they take the place of those of an earlier start."""

    def __init__(self, directory: Path, settings: Mapping, first: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=first)

    def scalars(self, values: Mapping[str, float], update: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, update)
        self._writer.flush()

    def picture(self, path: Path, update: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        png = path.read_bytes()  # goes as it is, with the size that its header says
        width, height = struct.unpack(">II", png[16:24])
        image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=png)
        self._writer.file_writer.add_summary(Summary(value=[Summary.Value(tag="samples", image=image)]), update)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A wandb run in RUN_DIR/wandb, offline unless WANDB_MODE says otherwise; WANDB_PROJECT and the like hold.

    Its id is kept there, so that a resumed run is the same one.  Curves are over the update: wandb's own steps may not
    go back, as a run does that is resumed from a checkpoint before its end.
    """

    def __init__(self, directory: Path, settings: Mapping, first: int):
        import wandb

        self._wandb, folder = wandb, directory / "wandb"
        folder.mkdir(exist_ok=True)
        name = folder / "run_id.txt"
        if not name.is_file():
            name.write_text(uuid.uuid4().hex[:16], encoding="utf-8")
        self._run = wandb.init(
            dir=str(directory),
            id=name.read_text(encoding="utf-8").strip(),
            resume="allow",
            name=os.environ.get("WANDB_NAME", directory.name),
            project=os.environ.get("WANDB_PROJECT", "flowrl"),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=dict(settings),
            settings=wandb.Settings(console="off"),  # what a run prints is its own
        )
        self._run.define_metric("*", step_metric="update")

    def scalars(self, values: Mapping[str, float], update: int) -> None:
        self._run.log({**values, "update": update})

    def picture(self, path: Path, update: int) -> None:
        self._run.log({"samples": self._wandb.Image(str(path)), "update": update})

    def close(self) -> None:
        self._run.finish()


KNOWN: Mapping[str, Callable[[Path, Mapping, int], Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb}


def check(names: Sequence[str]) -> None:
    """ValueError for a tracker whose package is not there."""
    for name in names:
        if not installed(name):
            raise ValueError(
                f"log.trackers: {name} is not installed. Install it ({EXTRA}), or take it out of the list."
            )


class Trackers:
    """The trackers of a run; `say` is told, once for each, what it failed with."""

    def __init__(
        self, names: Sequence[str], directory: Path, settings: Mapping, first: int, say: Callable[[str], None]
    ):
        self._say, self._failed, self._open = say, set(), {}
        for name in names:
            self._safely(name, lambda name=name: self._open.update({name: KNOWN[name](directory, settings, first)}))

    def log(self, line: Mapping[str, object], picture: Path | None) -> None:
        """A line of metrics.jsonl, and the grid of pictures of its evaluation."""
        update = line["iteration"]
        values = {n: float(x) for n, x in line.items() if isinstance(x, int | float) and n != "iteration"}
        for name, tracker in self._open.items():
            self._safely(name, lambda tracker=tracker: tracker.scalars(values, update))
            if picture:
                self._safely(name, lambda tracker=tracker: tracker.picture(picture, update))

    def close(self) -> None:
        for name, tracker in self._open.items():
            self._safely(name, tracker.close)
        self._open = {}

    def _safely(self, name, call):
        try:
            call()
        except Exception as error:  # of a foreign library, for which no run is given up
            if name not in self._failed:
                self._failed.add(name)
                said = " ".join(f"{type(error).__name__}: {error}".split())
                self._say(f"tracker {name} failed ({said}); the run goes on, and metrics.jsonl holds everything.")
