"""heartbeat.json: where the run's first process stands, for those who look from outside."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megakernel.parallel.progress import Progress

FILE = "heartbeat.json"

BEAT_SECONDS = 5.0


class Heartbeat:
    """Writes from entry to exit of a `with` block, in a thread: a step that hangs shows as one that does not move.

    run: the run's folder. progress: of this process, which is the first of the run. slowest: what is known of the
    slowest rank, empty before it is.
    """

    def __init__(
        self,
        run: Path,
        progress: Progress,
        slowest: Callable[[], Mapping[str, Any]] = dict,
        every: float = BEAT_SECONDS,
    ):
        self._file = run / FILE
        self._progress = progress
        self._slowest = slowest
        self._every = every
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._beat()
            if self._stopped.wait(self._every):
                return

    def _beat(self) -> None:
        here = {"time": time.time(), "host": socket.gethostname(), "process": os.getpid()}
        staged = self._file.with_name(FILE + ".partial")
        try:
            told = here | self._progress.snapshot() | {"slowest": dict(self._slowest())}
            staged.write_text(json.dumps(told) + "\n")
            staged.replace(self._file)
        except OSError:
            pass  # A disk that is full for a moment must not end a run that could still compute.
