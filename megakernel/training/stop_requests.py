"""Requests to save and stop: signals, and stop files in run folders."""

import os
import signal
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import FrameType


class Stop(IntEnum):
    """A request to save and stop; the greatest of all ranks' requests applies.

    `exit_status` is 85 if the batch script may restart the run (preemption, time limit, Ctrl-C), 143 if it should stay
    stopped. Stop files and a closed terminal mean the latter: the user wants the run to end.
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
        """Exit status after saving and stopping for this reason; 0 for NONE."""
        if self is Stop.NONE:
            return 0
        return 143 if self >= Stop.STOP_FILE else 85


SIGNALS = {signal.Signals[stop.name]: stop for stop in Stop if stop.name.startswith("SIG")}

SAME_KEYPRESS_SECONDS = 1.0
"""Under torchrun one Ctrl-C reaches a rank twice: from the terminal, and forwarded by the agent."""


_BLOCKED = {signal.SIGUSR1, signal.SIGUSR2}


def block_stop_signals() -> None:
    """Block SIGUSR1 and SIGUSR2 until the training loop handles them, so that an early one still saves the first step.

    Call before starting threads, which inherit the mask. SIGTERM and Ctrl-C end a starting process at once.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)


_deferred: list[int] = []
"""SIGUSR1 and SIGUSR2 received between two training loops or after the last."""


def _defer(number: int, frame: FrameType | None) -> None:
    _deferred.append(number)


class StopRequests:
    """Records requests within a `with` block, without interrupting a step.

    After each step every rank calls `pending()` and the ranks take the maximum. `accept` then fixes the agreed reason:
    later signals change nothing, so that all ranks exit with the same status. Only a second Ctrl-C ends the process at
    once, by SIGINT itself, even during a save (saves are atomic).

    stop_files: files that `pending` looks for; pass them on rank 0 only.
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
                continue  # `nohup`: the run should survive its terminal
            self._previous[number] = signal.signal(number, self._record)
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
        while _deferred:
            self._record(_deferred.pop(), None)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            # A request after the work is done must not kill the process. A signal that was blocked is blocked again
            # below; it also gets a handler, because threads that were started meanwhile do not block it.
            blocked = number in _BLOCKED & self._mask
            signal.signal(number, _defer if blocked else handler)  # type: ignore[arg-type]
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def pending(self) -> Stop:
        """The strongest request that this process has seen."""
        if not self._accepted and any(file.exists() for file in self.stop_files):
            self._seen = max(self._seen, Stop.STOP_FILE)
        return self._seen

    def accept(self, agreed: Stop) -> None:
        """Fix the reason that all ranks agreed on; call before saving."""
        self._seen, self._accepted = agreed, True

    def saved(self) -> None:
        """Remove the stop files of an accepted request; call after saving, so that a failed save leaves them."""
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
