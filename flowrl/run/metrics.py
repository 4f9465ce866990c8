"""What a run tells: `metrics.jsonl`, one object per update, and a line of progress with rate and time left."""

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from flowrl.run.files import replace_text, sync


class Metrics:
    """Append-only log; every line is whole and flushed before the next update starts.

    lines: what a resumed run goes on from, in the place of what the file holds
    """

    def __init__(self, file: Path | None, lines: Sequence[dict] | None = None):
        self._file = file
        self.lines: list[dict] = list(lines or ())
        if file and lines is not None:
            replace_text(file, "".join(json.dumps(line) + "\n" for line in lines))

    def write(self, entry: dict) -> None:
        line = {name: _number(value) for name, value in entry.items()}
        self.lines.append(line)
        if self._file:
            with self._file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")

    def sync(self) -> None:
        """Wait until the lines are on the disk, so that no checkpoint is ahead of them."""
        if self._file and self.lines:
            sync(self._file)


def read_lines(file: Path, update: int) -> list[dict]:
    """The lines of a log up to that of `update`; ValueError if they are not all there."""
    lines: list[dict] = []
    for text in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            lines.append(json.loads(text))
        except ValueError:  # the last line of a run that was killed may be torn
            break
    kept = [line for line in lines if line["iteration"] <= update]
    if [line["iteration"] for line in kept] != list(range(update + 1)):
        raise ValueError(f"{file} does not hold the lines of updates 0 to {update}, which the checkpoint follows.")
    return kept


def _number(value):
    value = value.item() if isinstance(value, Tensor) else value
    if isinstance(value, float):
        return float(f"{value:.8g}") if math.isfinite(value) else str(value)
    return value


class Progress:
    """Prints to a terminal one line that renews itself, to a file one line every `every` seconds."""

    def __init__(self, total: int, *, shown: bool, every: float = 10.0):
        self._total, self._shown, self._every = total, shown, every
        self._terminal = sys.stdout.isatty()
        self._started = self._last = time.monotonic()
        self._first = 0

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._shown:
            print(("\r\x1b[K" if self._terminal else "") + _safe(text), flush=True)

    def begin(self, done: int = 0) -> None:
        """The next update starts now: what came before, and `done` updates of an earlier start, take no time."""
        self._first = done
        self._started = self._last = time.monotonic()

    def update(self, done: int, facts: dict[str, float | int]) -> None:
        """After `done` updates: rate, time left and the facts."""
        pace = (time.monotonic() - self._started) / (done - self._first)
        left = duration(pace * (self._total - done))
        told = "  ".join(f"{name} {value:.4g}" for name, value in facts.items())
        self.renew(f"update {done}/{self._total}  {pace:.2f} s each  {left} left  {told}", now=done == self._total)

    def renew(self, text: str, *, now: bool) -> None:
        """The line that renews itself; `now` prints it to a file too, however soon after the last."""
        moment = time.monotonic()
        if not self._shown or not (self._terminal or now or moment - self._last >= self._every):
            return
        self._last, text = moment, _safe(text)
        print(f"\r\x1b[K{text}" if self._terminal else text, end="" if self._terminal else "\n", flush=True)


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def _safe(text: str) -> str:
    """The text as this terminal can show it."""
    encoding = sys.stdout.encoding or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)
