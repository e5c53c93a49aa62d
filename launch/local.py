"""Start the ranks of a run on this machine and supervise them until the last one exits."""

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
from typing import Any, BinaryIO, NoReturn

from launch.environment import free_port
from launch.exit_status import ExitStatus
from launch.messages import INTERRUPTED, error_lines, print_error, printable
from megakernel.parallel.processes import ProcessEnvironment

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""Signals that are forwarded to every rank, which act on them together at their next step. Signals that this process
ignores, such as HUP under `nohup`, are not forwarded."""

SETTLE_SECONDS = 2.0
"""Time for the other ranks to end by themselves after a failure: the same cause often ends all, and each prints why."""

_CLEAN_EXITS = (ExitStatus.DONE, ExitStatus.STOPPED, ExitStatus.TERMINATED)
_PRINTED_BY_RANK_0 = (ExitStatus.USAGE, ExitStatus.IN_USE)
_PASSED_ON = (*_PRINTED_BY_RANK_0, ExitStatus.STALLED, ExitStatus.NOT_FINITE, ExitStatus.NOT_PREPARED)
_POLL_SECONDS = 0.02
_LAST_LINES = 12


def run_ranks(
    command: Sequence[str],
    nproc: int,
    log_folder: Path,
    *,
    env: Mapping[str, str] = os.environ,
    grace_seconds: float = 10.0,
    straggler_seconds: float = 60.0,
) -> int:
    """Run `command` as ranks 0 to nproc - 1 of one world and return the exit status of the whole.

    Each rank gets torchrun's variables. The output of rank K goes to log_folder/rank_K.log; that of rank 0 is also
    shown on this console, as far as it can be written. Signals in FORWARDED reach every rank. When a rank fails, or
    `straggler_seconds` after one exited without the others, the others are ended and the first failure is printed. They
    have SETTLE_SECONDS to exit by themselves, then get TERM, and after `grace_seconds` KILL.

    Returns 0, 85 or 143 if all ranks agree on it; 2, 86, 89, 90 or 92 if the first failure is a usage error, a step
    that made no progress, a non-finite loss, a run folder in use or data that could not be made ready; otherwise 1.
    """
    received: list[int] = []  # oldest first
    with handle_signals(FORWARDED, received.append):
        ranks = [
            RankProcess(command, variables, log_folder / f"rank_{number}.log", on_console=number == 0)
            for number, variables in enumerate(_environments(nproc, env))
        ]
        try:
            failure = _watch(ranks, received, straggler_seconds)
            if failure is not None:
                _end_ranks(ranks, grace_seconds)
        finally:
            for rank in ranks:
                rank.kill()
                rank.close()
    return _outcome(ranks, failure)


def _environments(nproc: int, env: Mapping[str, str]) -> Iterator[dict[str, str]]:
    port = free_port(os.getpid())
    threads = max(1, len(os.sched_getaffinity(0)) // nproc)
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    for rank in range(nproc):
        process = ProcessEnvironment(rank, nproc, rank, nproc, master_port=port)
        # Without OMP_NUM_THREADS the threads of every rank would compete for all cores.
        defaults = {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": loopback, "PYTHONUNBUFFERED": "1"}
        if rank == 0 and os.isatty(1):
            defaults["FORCE_COLOR"] = "1"  # its stdout is a pipe that this process copies to the terminal
        yield {**defaults, **env, **process.variables()}


def import_variables() -> dict[str, str]:
    """Variables for `python -m`, which else imports a datasets.py in the working folder in place of the library."""
    return {} if {"", os.getcwd()} & {*sys.path} else {"PYTHONSAFEPATH": "1"}


@contextmanager
def handle_signals(signals: Iterable[int], act: Callable[[int], object]) -> Iterator[None]:
    """Within the context, call `act` with each of these signals that arrives, except for ignored ones."""
    active = [signum for signum in signals if signal.getsignal(signum) != signal.SIG_IGN]
    previous = {signum: signal.signal(signum, lambda signum, frame: act(signum)) for signum in active}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def exit_with(signum: int) -> NoReturn:
    """End as a shell says that a signal ended a program, after all clean-up."""
    raise SystemExit(128 + signum)


@dataclass(frozen=True)
class _Failure:
    rank: int
    text: str
    status: int | None = None
    """Exit status of the rank; None if it is still running."""


def _watch(ranks: "Sequence[RankProcess]", received: list[int], straggler_seconds: float) -> _Failure | None:
    """Forward signals until every rank has exited, or until the first failure."""
    sent: set[int] = set()
    first_exit: tuple[int, float] | None = None
    while True:
        while received:
            signum = received.pop(0)
            sent.add(signum)
            for rank in ranks:
                rank.send(signum)
        statuses = [rank.status() for rank in ranks]
        for number, status in enumerate(statuses):
            if status is not None and status not in _CLEAN_EXITS:
                return _Failure(number, _describe_end(number, status, sent), status)
            if status is not None and first_exit is None:
                first_exit = number, time.monotonic()
        if None not in statuses:
            return None
        if first_exit is not None and time.monotonic() - first_exit[1] > straggler_seconds:
            late = statuses.index(None)
            return _Failure(
                late, f"rank {late} still runs {straggler_seconds:g} s after rank {first_exit[0]} exited"
            )
        time.sleep(_POLL_SECONDS)


def _describe_end(rank: int, status: int, sent: set[int]) -> str:
    if status > 0:
        return f"rank {rank} failed with exit status {status}"
    name = signal.Signals(-status).name
    if -status in sent:
        return (
            f"rank {rank} was ended by {name} before it could save; nothing after the last checkpoint is kept"
        )
    hint = ", which is also what the kernel sends when memory runs out" if name == "SIGKILL" else ""
    return f"rank {rank} was ended by {name}{hint}"


def _end_ranks(ranks: "Sequence[RankProcess]", grace_seconds: float) -> None:
    """End the ranks that still run: one that waits for a dead rank would wait for the collective's timeout."""
    if not _all_exited_within(SETTLE_SECONDS, ranks):
        for rank in ranks:
            rank.send(signal.SIGTERM)
        _all_exited_within(grace_seconds, ranks)


def _all_exited_within(seconds: float, ranks: "Sequence[RankProcess]") -> bool:
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
        print_error(f"the ranks ended with different exit statuses ({ends})")
        return ExitStatus.FAILED
    if failure.status in _PRINTED_BY_RANK_0 and statuses[0] == failure.status:
        return failure.status  # rank 0 already printed the error on this console
    if _was_interrupted(ranks[0]) and _was_interrupted(ranks[failure.rank]):
        return ExitStatus.FAILED  # rank 0 printed that as well
    rank = ranks[failure.rank]
    print_error(f"{failure.text}; its output is in {rank.log}")
    if failure.rank != 0:
        for line in rank.last_lines(_LAST_LINES):
            print(f"    {printable(line)}", file=sys.stderr, flush=True)
    return failure.status if failure.status in _PASSED_ON else ExitStatus.FAILED


def _was_interrupted(rank: "RankProcess") -> bool:
    """Whether Ctrl-C ended the rank before it had anything to save."""
    return error_lines(INTERRUPTED)[0] in rank.last_lines(_LAST_LINES)


_PR_SET_PDEATHSIG = 1
_OUTPUT_TIMEOUT = 5.0
_LIBC = ctypes.CDLL(None)


def _die_with_the_launcher() -> None:
    """Runs in the child: the kernel kills the rank when its launcher dies, so that no orphan keeps writing."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_TERMINAL_CODES = re.compile(rb"\x1b\[K[^\r\n]*\r|\x1b\[[0-9;]*[mK]")
"""A line that is overwritten by the next one, and color codes."""


class _PlainLog(io.FileIO):
    """A file that keeps of terminal output only the final lines, without colors."""

    _unfinished = b""

    def write(self, data: Any, /) -> int:
        whole, newline, self._unfinished = (self._unfinished + bytes(data)).rpartition(b"\n")
        super().write(_TERMINAL_CODES.sub(b"", whole) + newline)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            with suppress(OSError):  # the disk is full
                super().write(_TERMINAL_CODES.sub(b"", self._unfinished))
        super().close()


class RankProcess:
    """A running rank.

    log: file that the output is appended to. on_console: also copy stdout and stderr to those of this process.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, on_console: bool):
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        file = _PlainLog(log, "ab")
        started = f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(command)}\n"
        file.write(started.encode(errors="backslashreplace"))  # a command line need not be UTF-8
        self._log_start = file.tell()
        self._process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if on_console else file,
            stderr=subprocess.PIPE if on_console else subprocess.STDOUT,
            # Otherwise a terminal's Ctrl-C would reach the ranks twice: directly and through the launcher.
            start_new_session=True,
            preexec_fn=_die_with_the_launcher,
        )
        self._console_chunks: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        if on_console:
            self._threads = [
                threading.Thread(target=self._copy_output, args=(file,), daemon=True),
                threading.Thread(target=_write_chunks, args=(self._console_chunks,), daemon=True),
            ]
            for thread in self._threads:
                thread.start()
        else:
            file.close()

    def status(self) -> int | None:
        """Exit status, -N if signal N ended the rank, or None while it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Signal only the rank, not the processes that it started, which end with it."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill a rank that still runs, and all processes in its group."""
        if self.status() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """Wait until all output is written, but not long: a child of the rank or an unread console may block it."""
        if not self._threads:
            return
        copier, writer = self._threads
        copier.join(timeout=_OUTPUT_TIMEOUT)
        self._console_chunks.put(None)
        backlog = None
        while writer.is_alive() and backlog != self._console_chunks.qsize():
            backlog = self._console_chunks.qsize()
            writer.join(timeout=_OUTPUT_TIMEOUT)

    def last_lines(self, count: int) -> list[str]:
        """The last nonempty lines that the rank wrote since its start."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-count:]

    def _copy_output(self, log: BinaryIO) -> None:
        """Read the rank's output as it comes: a full pipe would block the rank."""
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
                        with suppress(OSError):  # the disk is full
                            log.write(chunk)
                        self._console_chunks.put((key.data, chunk))
                    else:
                        ready.unregister(key.fileobj)


def _write_chunks(chunks: "queue.SimpleQueue[tuple[int, bytes] | None]") -> None:
    """Write to the console in a thread of its own: a console that is full, gone or stopped blocks no rank."""
    while (item := chunks.get()) is not None:
        stream, chunk = item
        with suppress(OSError):
            while chunk:
                chunk = chunk[os.write(stream, chunk) :]
