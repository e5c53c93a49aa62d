"""One rank as a child process, with its log."""

import ctypes
import io
import os
import queue
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

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
