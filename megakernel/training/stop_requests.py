"""What asks this process to save and stop: signals, and on one rank stop files of run folders.

`Stop` is the reason, and the exit status that tells the launcher.
"""

import os
import signal
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import FrameType


class Stop(IntEnum):
    """A request to save and stop. Where ranks saw different ones the greatest wins: agreeing is a maximum.

    `exit_status` is 85 where the batch script may start the run again (preemption, time limit, Ctrl-C) and
    143 where the run should stay stopped. A stop file and a terminal that was closed count as the latter: whoever
    did that wants the run to end, and a requeued job would not.
    """

    NONE = 0
    SIGUSR1 = 1
    SIGUSR2 = 2
    SIGINT = 3
    STOP_FILE = 4
    SIGHUP = 5
    SIGTERM = 6

    @property
    def exit_status(self) -> int:
        """Exit status of a process that saved and stopped for this reason; 0 for NONE."""
        if self is Stop.NONE:
            return 0
        return 143 if self >= Stop.STOP_FILE else 85


SIGNALS = {signal.Signals[stop.name]: stop for stop in Stop if stop.name.startswith("SIG")}

SAME_KEYPRESS_SECONDS = 1.0
"""One Ctrl-C reaches a rank twice under torchrun: from the terminal, and forwarded by the agent."""


_HELD = {signal.SIGUSR1, signal.SIGUSR2}


def hold_requests() -> None:
    """From here until the loop listens, requests to make room wait: a job told early still saves its first step.

    Called before any thread is started, for threads inherit it. TERM and Ctrl-C end a process that starts at once.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)


_late: list[int] = []
"""Requests to make room that came between two loops, or behind the last."""


def _note_late(number: int, frame: FrameType | None) -> None:
    _late.append(number)


class StopRequests:
    """Records requests from entry to exit of a `with` block; a step is never torn apart by a handler.

    Every rank asks `pending()` at each step boundary and the ranks take the maximum. `accept` then fixes the
    agreed reason: later signals change nothing, so that all ranks exit with one status. Only a second Ctrl-C
    ends the process at once, by SIGINT itself, also in the middle of a save (saves are atomic).

    stop_files: looked for by `pending`; give them on rank 0 alone.
    """

    def __init__(self, *stop_files: Path, clock: Callable[[], float] = time.monotonic):
        self.stop_files = stop_files
        self._clock = clock
        self._seen = Stop.NONE
        self._accepted = False
        self._interrupted_at: float | None = None
        self._previous: dict[signal.Signals, object] = {}
        self._mask: set[signal.Signals | int] = set()

    def __enter__(self) -> "StopRequests":
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # `nohup`: the run is to outlive its terminal
            self._previous[number] = signal.signal(number, self._record)
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)
        while _late:
            self._record(_late.pop(), None)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            # Held again where they were: a request that comes when the work is done has nothing left to end. Threads
            # that were started meanwhile let them through.
            late = number in _HELD & self._mask
            signal.signal(number, _note_late if late else handler)  # type: ignore[arg-type]
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def pending(self) -> Stop:
        """The strongest request this process knows of."""
        if not self._accepted and any(file.exists() for file in self.stop_files):
            self._seen = max(self._seen, Stop.STOP_FILE)
        return self._seen

    def accept(self, agreed: Stop) -> None:
        """Fix the reason all ranks agreed on; call before saving."""
        self._seen, self._accepted = agreed, True

    def saved(self) -> None:
        """Remove stop files that have had their effect; called after saving, a failed save leaves them."""
        if self._seen.exit_status == Stop.STOP_FILE.exit_status:
            for file in self.stop_files:
                file.unlink(missing_ok=True)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = self._clock()
            if self._interrupted_at is None:
                self._interrupted_at = now
            elif now - self._interrupted_at > SAME_KEYPRESS_SECONDS:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGINT)
        if not self._accepted:
            self._seen = max(self._seen, SIGNALS[signal.Signals(number)])
