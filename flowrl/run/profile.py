"""Where the time of an update goes."""

import time
from collections.abc import Callable
from functools import wraps

import torch


class Clock:
    """Seconds per part.  `watch` replaces a method by one that is timed; a part inside another counts once, outside."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._inside = False

    def watch(self, owner: object, method: str, part: str) -> None:
        setattr(owner, method, self.timed(part, getattr(owner, method)))

    def timed(self, part: str, fn: Callable) -> Callable:
        @wraps(fn)
        def run(*args, **kwargs):
            if self._inside:
                return fn(*args, **kwargs)
            self._inside, started = True, _now()
            try:
                return fn(*args, **kwargs)
            finally:
                self._inside = False
                self.seconds[part] = self.seconds.get(part, 0.0) + _now() - started

        return run

    def shares(self, total: float) -> dict[str, float]:
        """Share of `total` seconds per part and of all the rest; starts anew."""
        spent, self.seconds = self.seconds, {}
        return {part: s / total for part, s in spent.items()} | {"other": 1 - sum(spent.values()) / total}


def _now():
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
