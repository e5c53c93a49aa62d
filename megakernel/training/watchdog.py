"""A thread next to the training loop tells where this process is, and ends a job in which a step does not go on.

heartbeat.json says it to those who look from outside. Processes tell each other through the job's store: a collective
waits for the slowest one without a word, and when its timeout comes it says who waited, not for whom. The process that
first sees no progress for too long reads what all have told and tells the others which ranks are behind; each of them
prints that and its stacks, and leaves.
"""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megakernel.parallel.progress import Progress, laggards

if TYPE_CHECKING:
    from megakernel.parallel import Mesh

STALLED = 86
"""Exit status of a process that has ended a job that stood still; a batch script may start it again."""

FILE = "heartbeat.json"

BEAT_SECONDS = 5.0
"""Between two writings of the file."""

_TELL_SECONDS = 1.0
"""Between two messages to the other processes, where these are not too many."""

_TELLS_PER_SECOND = 2048
"""Messages of all processes together: one thread of one process serves the store, beside its training."""

_BEATS = 4
"""A process that tells nothing for so long is stopped or gone: the thread that tells runs also where a step hangs."""


class Watchdog:
    """Tells and watches from entry to exit of a `with` block.

    start_minutes: without progress in the first step, in which kernels are compiled and connections made.
    stall_minutes: in later steps. run: the folder for heartbeat.json, which the job's first process writes; None:
    nobody does. slowest: what is known of the slowest rank, empty before it is.
    """

    def __init__(
        self,
        mesh: "Mesh",
        start_minutes: float,
        stall_minutes: float,
        run: Path | None = None,
        slowest: Callable[[], Mapping[str, Any]] = dict,
    ):
        self._mesh = mesh
        self._start = 60 * start_minutes
        self._stall = 60 * stall_minutes
        self._limit = self._start
        self._file = run / FILE if run is not None and mesh.rank == 0 else None
        self._written = -float("inf")
        self._slowest = slowest
        self._watching = threading.Event()
        self._stopped = threading.Event()
        self._beats = 0
        self._tell_every = min(max(_TELL_SECONDS, mesh.world_size / _TELLS_PER_SECOND), self._stall / 4)
        # A connection of its own: a call that waits keeps the other users of a store waiting.
        self._store: Any = mesh.store.clone() if mesh.world_size > 1 else None  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._store is not None or self._file is not None:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around all that optimizer step `step`, counted from 0, waits for; what follows may take its time: evaluations
        and saves, in which a process that waits has the collectives' timeout alone."""
        progress = self._mesh.progress
        progress.step = step
        progress.reach("loading data")
        self._watching.set()
        yield
        self._watching.clear()
        self._limit = self._stall

    def expect_start(self) -> None:
        """The next step is like a first one: sequences have another length."""
        self._limit = self._start

    def _run(self) -> None:
        seen, since = self._tell(), time.monotonic()
        while not self._stopped.wait(self._tell_every):
            now = self._tell()
            if now != seen or not self._watching.is_set():
                seen, since = now, time.monotonic()
            elif self._store is not None and time.monotonic() - since > self._limit:
                self._end()

    def _tell(self) -> dict[str, Any]:
        now = self._mesh.progress.snapshot()
        self._beats += 1
        if self._store is not None:
            told = now | {"host": socket.gethostname(), "beats": self._beats}
            self._store.set(_key(self._mesh.rank), json.dumps(told))
        if self._file is not None and time.monotonic() - self._written >= BEAT_SECONDS:
            self._written = time.monotonic()
            self._write(self._file, now)
        return now

    def _write(self, file: Path, now: Mapping[str, Any]) -> None:
        told: dict[str, Any] = {"time": time.time(), "host": socket.gethostname(), "process": os.getpid()}
        told |= {**now, "slowest": dict(self._slowest())}
        staged = file.with_name(FILE + ".partial")
        try:
            staged.write_text(json.dumps(told) + "\n")
            staged.replace(file)
        except OSError:
            pass  # A disk that is full for a moment must not end a run that could still compute.

    def _end(self) -> None:
        try:
            message = self._found()
        except RuntimeError:  # as the store raises where the process that serves it is gone
            place = self._mesh.progress.place
            message = f"no progress for {self._limit:g} s in {place!r}; see what other ranks say, this one cannot ask"
        faulthandler.dump_traceback(all_threads=True)
        # Last, because a launcher shows the last lines of a rank that failed.
        print(f"error: {message}", file=sys.stderr, flush=True)
        if self._mesh.rank == 0:
            self._stopped.wait(self._tell_every)  # it may serve the store, where others have yet to read
        os._exit(STALLED)

    def _found(self) -> str:
        """Where the job stands still: the first rank that asks reads it for all, who would read as much each."""
        is_first = self._store.add(_ASKED, 1) == 1
        before = self._told() if is_first else {}
        for beat in range(1, 3 * _BEATS + 1):
            self._stopped.wait(self._tell_every)
            self._tell()  # whoever asks sees who still does
            if is_first and beat == _BEATS:
                self._store.set(_FOUND, self._compared(before))
            if self._store.check([_FOUND]):
                return self._store.get(_FOUND).decode()
        raise RuntimeError("the rank that asked first is gone")

    def _compared(self, before: Mapping[int, Mapping[str, Any]]) -> str:
        told = self._told()
        hosts = {rank: one.pop("host") for rank, one in told.items()}
        beats = {rank: one.pop("beats") for rank, one in told.items()}
        silent = [rank for rank, one in before.items() if one["beats"] == beats[rank]]
        everywhere = {rank: Progress(**one) for rank, one in told.items()}
        return stalled(everywhere, self._limit, hosts, silent)

    def _told(self) -> dict[int, dict[str, Any]]:
        """What each rank told last; of one that was stopped before it told anything, that it starts."""
        keys = [_key(rank) for rank in range(self._mesh.world_size)]
        there = keys if self._store.check(keys) else [key for key in keys if self._store.check([key])]
        found = dict(zip(there, self._store.multi_get(there)))
        nothing = json.dumps(Progress().snapshot() | {"host": "an unknown node", "beats": 0})
        return {rank: json.loads(found.get(key, nothing)) for rank, key in enumerate(keys)}


def stalled(
    everywhere: Mapping[int, Progress], seconds: float, hosts: Mapping[int, str], silent: Sequence[int] = ()
) -> str:
    """One line: where the job stands still and for whom it waits; silent: ranks that tell nothing any more."""
    if silent:
        names = _names(silent, hosts)
        last = everywhere[silent[0]]
        where = f"{last.place!r} of step {last.step + 1}"
        return f"no progress for {seconds:g} s: rank {names} no longer answers, and was last in {where}"
    late = laggards(everywhere)
    first = everywhere[late[0]]
    names = _names(late, hosts)
    where = f"{first.place!r} of step {first.step + 1}"
    others = [rank for rank in everywhere if rank not in late]
    if not others:
        return f"no progress for {seconds:g} s: all ranks have come to {where}"
    place = everywhere[others[0]].place
    return f"no progress for {seconds:g} s: rank {names} has come to {where}, others wait in {place!r}"


def _names(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """The first of them: every rank prints the line."""
    named = ", ".join(f"{rank} on {hosts[rank]}" for rank in ranks[:_MOST_NAMES])
    return named + (f" and {len(ranks) - _MOST_NAMES} more" if len(ranks) > _MOST_NAMES else "")


_MOST_NAMES = 16

_ASKED, _FOUND = "megakernel/stalled/asked", "megakernel/stalled/found"


def _key(rank: int) -> str:
    return f"megakernel/progress/{rank}"
