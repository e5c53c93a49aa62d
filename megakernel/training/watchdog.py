"""A watchdog thread that reports this rank's progress and ends a job in which a step hangs.

heartbeat.json reports it to users. Ranks report to each other through the job's store, because the timeout of a
collective says who waited, not for whom. The rank that first sees no progress for too long compares all reports and
publishes which ranks are behind; every rank prints that and its stacks, and exits.
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
"""Exit status of a process that ended a stalled job; a batch script may restart it."""

FILE = "heartbeat.json"

BEAT_SECONDS = 5.0
"""Seconds between writes of heartbeat.json."""

_REPORT_SECONDS = 1.0
"""Seconds between two reports to the other ranks, unless there are too many."""

_REPORTS_PER_SECOND = 2048
"""Limit for all ranks together: a single thread of one training process serves the store."""

_MISSED_REPORTS = 4
"""Reports after whose absence a process is considered stopped or gone: the thread reports even if a step hangs."""


class Watchdog:
    """Reports and watches within a `with` block.

    start_minutes: limit without progress in the first step, which compiles kernels and connects ranks.
    stall_minutes: limit in later steps; on GPUs at least twice the time of the last step, because the host runs ahead
    and may show no progress while its GPU works through most of a step.
    run: folder of heartbeat.json, which rank 0 writes; None: no file.
    findings: returns what else heartbeat.json should hold: `LocalWork.slowest`, `GpuSignals.found`.
    """

    def __init__(
        self,
        mesh: "Mesh",
        start_minutes: float,
        stall_minutes: float,
        run: Path | None = None,
        findings: Callable[[], Mapping[str, Any]] = dict,
    ):
        self._mesh = mesh
        self._start = 60 * start_minutes
        self._stall = 60 * stall_minutes
        self._limit = self._start
        self._file = run / FILE if run is not None and mesh.rank == 0 else None
        self._written = -float("inf")
        self._findings = findings
        self._watching = threading.Event()
        self._stopped = threading.Event()
        self._report_count = 0
        self._report_every = min(max(_REPORT_SECONDS, mesh.world_size / _REPORTS_PER_SECOND), self._stall / 4)
        # A separate connection: a blocking call blocks the other users of a store's connection.
        self._store: Any = mesh.store.clone() if mesh.world_size > 1 else None  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

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
        """Watches optimizer step `step`, counted from 0. Evaluations and saves, between steps, may take longer: only
        the timeout of collectives applies there."""
        progress = self._mesh.progress
        progress.step = step
        progress.begin("loading data")
        began = time.monotonic()
        self._watching.set()
        yield
        self._watching.clear()
        self._limit = self._stall
        if self._mesh.device.type == "cuda":
            self._limit = max(self._stall, 2 * (time.monotonic() - began))

    def expect_slow_step(self) -> None:
        """Apply the first step's limit to the next step, which has another sequence length."""
        self._limit = max(self._start, self._limit)

    def _watch(self) -> None:
        seen, since = self._report(), time.monotonic()
        while not self._stopped.wait(self._report_every):
            now = self._report()
            if now != seen or not self._watching.is_set():
                seen, since = now, time.monotonic()
            elif self._store is not None and time.monotonic() - since > self._limit:
                self._exit_stalled()

    def _report(self) -> dict[str, Any]:
        now = self._mesh.progress.snapshot()
        self._report_count += 1
        if self._store is not None:
            report = now | {"host": socket.gethostname(), "beats": self._report_count}
            self._store.set(_key(self._mesh.rank), json.dumps(report))
        if self._file is not None and time.monotonic() - self._written >= BEAT_SECONDS:
            self._written = time.monotonic()
            self._write(self._file, now)
        return now

    def _write(self, file: Path, now: Mapping[str, Any]) -> None:
        report: dict[str, Any] = {"time": time.time(), "host": socket.gethostname(), "process": os.getpid()}
        report |= {**now, **self._findings()}
        staged = file.with_name(FILE + ".partial")
        try:
            staged.write_text(json.dumps(report) + "\n")
            staged.replace(file)
        except OSError:
            pass  # a temporarily full disk must not end the run

    def _exit_stalled(self) -> None:
        try:
            message = self._agreed_message()
        except RuntimeError:  # raised by the store if the process that serves it is gone
            place = self._mesh.progress.place
            message = f"no progress for {self._limit:g} s in {place!r}; see what other ranks say, this one cannot ask"
        faulthandler.dump_traceback(all_threads=True)
        # Last, because launchers show the last lines of a failed rank.
        print(f"error: {message}", file=sys.stderr, flush=True)
        if self._mesh.rank == 0:
            self._stopped.wait(
                3 * self._report_every
            )  # it may serve the store, which others have yet to read
        os._exit(STALLED)

    def _agreed_message(self) -> str:
        """The line about the stall; the first rank to ask compares all reports, for all ranks."""
        is_first = self._store.add(_FIRST_KEY, 1) == 1
        before = self._reports() if is_first else {}
        for count in range(1, 3 * _MISSED_REPORTS + 1):
            self._stopped.wait(self._report_every)
            self._report()  # so that the asking rank sees which ranks still report
            if is_first and count == _MISSED_REPORTS:
                self._store.set(_MESSAGE_KEY, self._compare(before))
            if self._store.check([_MESSAGE_KEY]):
                return self._store.get(_MESSAGE_KEY).decode()
        raise RuntimeError("the rank that asked first is gone")

    def _compare(self, before: Mapping[int, Mapping[str, Any]]) -> str:
        reports = self._reports()
        hosts = {rank: report.pop("host") for rank, report in reports.items()}
        beats = {rank: report.pop("beats") for rank, report in reports.items()}
        silent = [rank for rank, report in before.items() if report["beats"] == beats[rank]]
        progress = {rank: Progress(**report) for rank, report in reports.items()}
        return stall_message(progress, self._limit, hosts, silent)

    def _reports(self) -> dict[int, dict[str, Any]]:
        """Last report of each rank; the initial Progress for a rank without any."""
        keys = [_key(rank) for rank in range(self._mesh.world_size)]
        there = keys if self._store.check(keys) else [key for key in keys if self._store.check([key])]
        texts = dict(zip(there, self._store.multi_get(there)))
        initial = json.dumps(Progress().snapshot() | {"host": "an unknown node", "beats": 0})
        return {rank: json.loads(texts.get(key, initial)) for rank, key in enumerate(keys)}


def stall_message(
    progress: Mapping[int, Progress], seconds: float, hosts: Mapping[int, str], silent: Sequence[int] = ()
) -> str:
    """One line that says where the job hangs and which ranks the others wait for; silent: ranks that report no more."""
    if silent:
        names = _names(silent, hosts)
        last = progress[silent[0]]
        where = f"{last.place!r} of step {last.step + 1}"
        return f"no progress for {seconds:g} s: rank {names} no longer answers, and was last in {where}"
    late = laggards(progress)
    first = progress[late[0]]
    names = _names(late, hosts)
    where = f"{first.place!r} of step {first.step + 1}"
    others = [rank for rank in progress if rank not in late]
    if not others:
        return f"no progress for {seconds:g} s: all ranks have come to {where}"
    place = progress[others[0]].place
    return f"no progress for {seconds:g} s: rank {names} has come to {where}, others wait in {place!r}"


def _names(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """The first ranks with their hosts; not all, because every rank prints the line."""
    named = ", ".join(f"{rank} on {hosts[rank]}" for rank in ranks[:_MOST_NAMES])
    return named + (f" and {len(ranks) - _MOST_NAMES} more" if len(ranks) > _MOST_NAMES else "")


_MOST_NAMES = 16

_FIRST_KEY, _MESSAGE_KEY = "megakernel/stalled/asked", "megakernel/stalled/found"


def _key(rank: int) -> str:
    return f"megakernel/progress/{rank}"
