"""Start the ranks of a run on this machine and watch over them until the last has left."""

import ctypes
import io
import os
import queue
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from launch.exit_status import ExitStatus
from launch.messages import INTERRUPTED, error_lines, print_error
from megakernel.parallel.processes import ProcessEnvironment

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""Signals to this process that every rank gets, to act on together at its next step; those of them that it ignores,
as `nohup` makes it ignore HUP, nobody gets."""

SETTLE_SECONDS = 2.0
"""What ends one rank often ends all, each with its own message; ending them sooner would cut those off."""

_LEAVING = (ExitStatus.DONE, ExitStatus.STOPPED, ExitStatus.TERMINATED)
_REFUSED = (ExitStatus.USAGE, ExitStatus.IN_USE)
_TELLING = (*_REFUSED, ExitStatus.STALLED, ExitStatus.NOT_FINITE)
_POLL_SECONDS = 0.02
_LAST_LINES = 12


def run_ranks(
    command: Sequence[str],
    nproc: int,
    log_folder: Path,
    *,
    env: Mapping[str, str] = os.environ,
    grace_seconds: float = 10.0,
    leave_seconds: float = 60.0,
) -> int:
    """Run `command` as ranks 0 to nproc - 1 of one world; the exit status of the whole.

    Each rank finds its place in torchrun's variables. What rank K writes is in log_folder/rank_K.log; this console
    shows that of rank 0 as well, as far as it can be written. Signals in FORWARDED reach every rank. When a rank
    fails, or `leave_seconds` after one has left without the others, the others are ended and the first failure is
    printed. A rank that is ended has SETTLE_SECONDS to leave by itself, then gets TERM, and after `grace_seconds` KILL.

    0, 85 or 143 where all ranks agree on it; 2, 86, 89 or 90 where the first failure is a usage error, a step that made
    no progress, a loss that is not finite or a run folder in use; else 1.
    """
    received: list[int] = []  # the oldest first
    with handled(FORWARDED, received.append):
        ranks = [
            RankProcess(command, variables, log_folder / f"rank_{number}.log", on_console=number == 0)
            for number, variables in enumerate(_environments(nproc, env))
        ]
        try:
            failure = _watch(ranks, received, leave_seconds)
            if failure is not None:
                _end(ranks, grace_seconds)
        finally:
            for rank in ranks:
                rank.kill()
                rank.close()
    return _outcome(ranks, failure)


def _environments(nproc: int, env: Mapping[str, str]) -> Iterator[dict[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = max(1, len(os.sched_getaffinity(0)) // nproc)
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    for rank in range(nproc):
        place = ProcessEnvironment(rank, nproc, rank, nproc, master_port=port)
        # Without OMP_NUM_THREADS each rank takes every core, and they get in each other's way.
        usual = {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": loopback, "PYTHONUNBUFFERED": "1"}
        if rank == 0 and os.isatty(1):
            usual["FORCE_COLOR"] = "1"  # it writes into a pipe, which this process copies to the terminal
        yield {**usual, **env, **place.variables()}


@contextmanager
def handled(signals: Iterable[int], act: Callable[[int], object]) -> Iterator[None]:
    """Call `act` with those of these signals that arrive and are not ignored; the previous handlers are back after."""
    heard = [signum for signum in signals if signal.getsignal(signum) != signal.SIG_IGN]
    previous = {signum: signal.signal(signum, lambda signum, frame: act(signum)) for signum in heard}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@dataclass(frozen=True)
class _Failure:
    rank: int
    text: str
    status: int | None = None
    """Exit status of the rank; None where it did not end."""


def _watch(ranks: "Sequence[RankProcess]", received: list[int], leave_seconds: float) -> _Failure | None:
    """Forward signals until every rank has left, or until the first failure."""
    sent: set[int] = set()
    first_left: tuple[int, float] | None = None
    while True:
        while received:
            signum = received.pop(0)
            sent.add(signum)
            for rank in ranks:
                rank.send(signum)
        statuses = [rank.status() for rank in ranks]
        for number, status in enumerate(statuses):
            if status is not None and status not in _LEAVING:
                return _Failure(number, _end_of(number, status, sent), status)
            if status is not None and first_left is None:
                first_left = number, time.monotonic()
        if None not in statuses:
            return None
        if first_left is not None and time.monotonic() - first_left[1] > leave_seconds:
            late = statuses.index(None)
            return _Failure(
                late, f"rank {late} still runs {leave_seconds:g} s after rank {first_left[0]} has left"
            )
        time.sleep(_POLL_SECONDS)


def _end_of(rank: int, status: int, sent: set[int]) -> str:
    if status > 0:
        return f"rank {rank} failed with exit status {status}"
    name = signal.Signals(-status).name
    if -status in sent:
        return (
            f"rank {rank} was ended by {name} before it could save; nothing after the last checkpoint is kept"
        )
    hint = ", which is also what the kernel sends when memory runs out" if name == "SIGKILL" else ""
    return f"rank {rank} was ended by {name}{hint}"


def _end(ranks: "Sequence[RankProcess]", grace_seconds: float) -> None:
    """End what still runs: a rank that waits for a dead one would wait for the collective's timeout."""
    if not _all_left_within(SETTLE_SECONDS, ranks):
        for rank in ranks:
            rank.send(signal.SIGTERM)
        _all_left_within(grace_seconds, ranks)


def _all_left_within(seconds: float, ranks: "Sequence[RankProcess]") -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(rank.status() is None for rank in ranks):
        time.sleep(_POLL_SECONDS)
    return all(rank.status() is not None for rank in ranks)


def _outcome(ranks: "Sequence[RankProcess]", failure: _Failure | None) -> int:
    statuses = [rank.status() for rank in ranks]
    if failure is None and len(set(statuses)) == 1:
        return statuses[0] or ExitStatus.DONE
    if failure is None:
        ends = ", ".join(f"rank {rank}: {status}" for rank, status in enumerate(statuses))
        print_error(f"the ranks ended with different exit status ({ends})")
        return ExitStatus.FAILED
    if failure.status in _REFUSED and statuses[0] == failure.status:
        return failure.status  # rank 0 has said on this console what has to change
    if _was_interrupted(ranks[0]) and _was_interrupted(ranks[failure.rank]):
        return ExitStatus.FAILED  # the same
    rank = ranks[failure.rank]
    print_error(f"{failure.text}; its output is in {rank.log}")
    if failure.rank != 0:
        for line in rank.last_lines(_LAST_LINES):
            print(f"    {line}", file=sys.stderr, flush=True)
    return failure.status if failure.status in _TELLING else ExitStatus.FAILED


def _was_interrupted(rank: "RankProcess") -> bool:
    """Whether Ctrl-C has ended it before it had anything to save."""
    return error_lines(INTERRUPTED)[0] in rank.last_lines(_LAST_LINES)


_PR_SET_PDEATHSIG = 1
_PATIENCE_SECONDS = 5.0
_LIBC = ctypes.CDLL(None)


def _die_with_the_launcher() -> None:
    """Runs in the child: a launcher that is killed outright leaves no ranks behind that go on writing."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_OF_A_TERMINAL = re.compile(rb"\x1b\[K[^\r\n]*\r|\x1b\[[0-9;]*[mK]")
"""A line that another takes the place of, and colours."""


class _Lines(io.FileIO):
    """A file that takes from what was written for a terminal the lines that stay, without their colours."""

    _rest = b""

    def write(self, data: Any, /) -> int:
        whole, newline, self._rest = (self._rest + bytes(data)).rpartition(b"\n")
        super().write(_OF_A_TERMINAL.sub(b"", whole) + newline)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            with suppress(OSError):  # a disk that is full
                super().write(_OF_A_TERMINAL.sub(b"", self._rest))
        super().close()


class RankProcess:
    """A running rank.

    command, env: what to run. log: file its output is appended to. on_console: show the output here as well, each
    stream where it belongs.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, on_console: bool):
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        file = _Lines(log, "ab")
        file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(command)}\n".encode())
        self._log_start = file.tell()
        self._process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if on_console else file,
            stderr=subprocess.PIPE if on_console else subprocess.STDOUT,
            # A terminal's Ctrl-C would reach the ranks past the launcher, and a second time through it.
            start_new_session=True,
            preexec_fn=_die_with_the_launcher if sys.platform == "linux" else None,
        )
        self._to_show: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        if on_console:
            self._threads = [
                threading.Thread(target=self._copy, args=(file,), daemon=True),
                threading.Thread(target=_show, args=(self._to_show,), daemon=True),
            ]
            for thread in self._threads:
                thread.start()
        else:
            file.close()

    def status(self) -> int | None:
        """Exit status, minus the signal's number where one ended it, or None while it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Signal the rank alone, not the processes it started: those live and end with it."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End a rank that still runs, and all it started, at once."""
        if self.status() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """Wait until all output is written; neither a process the rank left behind nor a console that nobody reads
        can hold this up for long."""
        if not self._threads:
            return
        copier, shower = self._threads
        copier.join(timeout=_PATIENCE_SECONDS)
        self._to_show.put(None)
        waiting = None
        while shower.is_alive() and waiting != self._to_show.qsize():
            waiting = self._to_show.qsize()
            shower.join(timeout=_PATIENCE_SECONDS)

    def last_lines(self, count: int) -> list[str]:
        """The last lines it has written since it started, empty ones left out."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-count:]

    def _copy(self, log: BinaryIO) -> None:
        """Take what the rank writes as it comes, for a rank whose pipe is full stands still."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        with (
            log,
            self._process.stdout as out,
            self._process.stderr as err,
            selectors.DefaultSelector() as ready,
        ):
            ready.register(out, selectors.EVENT_READ, 1)
            ready.register(err, selectors.EVENT_READ, 2)
            while ready.get_map():
                for key, _ in ready.select():
                    if chunk := os.read(key.fd, 1 << 16):
                        with suppress(OSError):  # a disk that is full
                            log.write(chunk)
                        self._to_show.put((key.data, chunk))
                    else:
                        ready.unregister(key.fileobj)


def _show(chunks: "queue.SimpleQueue[tuple[int, bytes] | None]") -> None:
    """Write to the console at the pace of whoever reads it: one that is full, gone or stopped holds no rank up."""
    while (item := chunks.get()) is not None:
        stream, chunk = item
        with suppress(OSError):
            while chunk:
                chunk = chunk[os.write(stream, chunk) :]
