"""Work of rank 0 that may take hours, such as reading a corpus, while the other ranks wait for it.

A collective would end after its timeout. Here the others ask the store of all processes whether rank 0 still works.
"""

import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from megakernel.config import PreparationFailed
from megakernel.config.errors import first_line

if TYPE_CHECKING:
    from . import Mesh

T = TypeVar("T")

BEAT_SECONDS = 5.0
"""Seconds between two signs of life of rank 0."""

_REPORT_SECONDS = 600.0
"""Seconds between two messages that the work goes on."""

_FIRST_WAIT, _LONGEST_WAIT = 0.02, 1.0
"""Seconds between two questions of a waiting rank, which double; longer with many ranks."""

_QUESTIONS_PER_SECOND = 2048
"""Limit for all ranks together: a single thread of one process serves the store."""

_DONE = 2**40
"""What rank 0 adds to the count of its beats at the end."""


def long_work(mesh: "Mesh", what: str, timeout_minutes: float, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 alone, however long it takes, and return its picklable result on every rank.

    what: the work, for messages, such as "indexing the corpora". timeout_minutes: without a sign of life of rank 0.

    Raises the action's ValueError or OSError on every rank, and PreparationFailed for any other error of it, or if
    rank 0 gives no sign of life.
    """
    mesh.progress.begin(what)
    if mesh.world_size == 1:
        return action()
    # The store counts the calls, so that every rank finds the same key.
    call = mesh.store.add(f"megakernel/work/calls/{mesh.rank}", 1)
    beats = f"megakernel/work/{call}"
    outcome: Any = None
    if mesh.rank == 0:
        with _Beats(mesh.store.clone(), beats, what):  # type: ignore[attr-defined]
            try:
                outcome = action()
            except (ValueError, OSError) as error:
                outcome = error
            except Exception as error:
                traceback.print_exc()
                outcome = PreparationFailed(
                    f"{what} failed on rank 0 ({type(error).__name__}: {first_line(error)})"
                )
    else:
        _wait(mesh, beats, what, 60 * timeout_minutes)
    outcome = mesh.broadcast_object(outcome)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _wait(mesh: "Mesh", beats: str, what: str, timeout: float) -> None:
    shortest = mesh.world_size / _QUESTIONS_PER_SECOND
    pause, seen, since = max(_FIRST_WAIT, shortest), -1, time.monotonic()
    while (count := mesh.store.add(beats, 0)) < _DONE:
        if count != seen:
            seen, since = count, time.monotonic()
        elif time.monotonic() - since > timeout:
            raise PreparationFailed(
                f"{what}: rank 0 has given no sign of life for {timeout / 60:g} minutes (parallel.timeout_minutes)"
            )
        time.sleep(pause)
        pause = max(min(2 * pause, _LONGEST_WAIT), shortest)


class _Beats:
    """Signs of life from a thread, within a `with` block; its end is one, too."""

    def __init__(self, store: Any, key: str, what: str):
        self._store, self._key, self._what = store, key, what
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="long work", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        self._store.add(self._key, _DONE)

    def _beat(self) -> None:
        began = reported = time.monotonic()
        self._store.add(self._key, 1)
        while not self._ended.wait(BEAT_SECONDS):
            self._store.add(self._key, 1)
            if time.monotonic() - reported >= _REPORT_SECONDS:
                reported = time.monotonic()
                print(f"still {self._what}, {(reported - began) / 60:.0f} minutes so far", flush=True)
