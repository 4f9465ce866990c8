"""Signals: SIGTERM and SIGINT stop a run at its next network call, SIGUSR1 asks for a checkpoint.

A handler only takes note, so that no step of the optimiser and no write is ever cut in two; a second signal ends the
process at once.  Under a launcher a second one within ECHO seconds is the first: Slurm signals every process of a step,
the launcher among them, which passes it on.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import wraps

ECHO = 2.0  # seconds


class Stopped(KeyboardInterrupt):
    """A run that a signal has stopped; `code` is what the shell expects of a process that ended so."""

    def __init__(self, said: str, code: int):
        super().__init__(said)
        self.code = code


class Stopping:
    """A context that takes note of signals; outside of the main thread Python allows none to be caught."""

    def __init__(self):
        self.signal: int | None = None  # that asked to stop
        self._since = 0.0  # time.monotonic() when it came
        self._echo = ECHO if "TORCHELASTIC_RUN_ID" in os.environ else 0.0
        self.wanted = False  # a checkpoint, at the end of the update
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is threading.main_thread():
            handlers = {signal.SIGTERM: self._stop, signal.SIGINT: self._stop, signal.SIGUSR1: self._want}
            self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(self, *fault) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def watch(self, owner: object, method: str, agree: Callable[[int], int] = lambda number: number) -> None:
        """Replace a method by one that raises Stopped, instead of starting, once a signal has come.

        agree: signal here, or 0 -> that of any process, where all have to stop at the same call
        """
        call = getattr(owner, method)

        @wraps(call)
        def run(*args, **kwargs):
            if heard := agree(self.signal or 0):
                self.signal = heard
                raise self.stopped("stopped")
            return call(*args, **kwargs)

        setattr(owner, method, run)

    def stopped(self, said: str) -> Stopped:
        return Stopped(said, 128 + self.signal)

    def _stop(self, number, frame):
        if self.signal is None:
            self.signal, self._since = number, time.monotonic()
        elif time.monotonic() - self._since >= self._echo:
            os._exit(128 + number)

    def _want(self, number, frame):
        self.wanted = True
