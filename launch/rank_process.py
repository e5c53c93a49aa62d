"""One rank as a child process, with its log."""

import ctypes
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

_PR_SET_PDEATHSIG = 1
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
            super().write(_OF_A_TERMINAL.sub(b"", self._rest))
        super().close()


class RankProcess:
    """A running rank.

    command, env: what to run. log: file its output is appended to. on_console: show the output here as well.
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
            stderr=subprocess.STDOUT,
            # A terminal's Ctrl-C would reach the ranks past the launcher, and a second time through it.
            start_new_session=True,
            preexec_fn=_die_with_the_launcher if sys.platform == "linux" else None,
        )
        self._copier: threading.Thread | None = None
        if self._process.stdout is not None:
            arguments = (self._process.stdout.fileno(), file)
            self._copier = threading.Thread(target=_copy_to_console_and, args=arguments, daemon=True)
            self._copier.start()
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
        """Wait until all output is written; a process the rank left behind cannot hold this up for long."""
        if self._copier is not None:
            self._copier.join(timeout=5.0)
        if self._process.stdout is not None and (self._copier is None or not self._copier.is_alive()):
            self._process.stdout.close()

    def last_lines(self, count: int) -> list[str]:
        """The last lines it has written since it started, empty ones left out."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-count:]


def _copy_to_console_and(source: int, log: BinaryIO) -> None:
    console: BinaryIO | None = sys.stdout.buffer
    with log:
        while chunk := os.read(source, 1 << 16):
            log.write(chunk)
            try:
                if console is not None:
                    console.write(chunk)
                    console.flush()
            except BrokenPipeError:
                console = None  # `megakernel pretrain ... | head` goes on training
