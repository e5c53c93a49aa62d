"""How far a run is, by what it has written into its folder."""

import json
import math
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import psutil

from megakernel.checkpoint.trained_run import recorded_config
from megakernel.training import events
from megakernel.training.watchdog import BEAT_SECONDS
from megakernel.training.watchdog import FILE as HEARTBEAT

_TAIL = 1 << 16
"""Last bytes of metrics.jsonl that are read."""

_SILENT_SECONDS = 6 * BEAT_SECONDS
"""A process that has not told where it is for so long is gone, or its disk is."""

_MOST_OF_A_REASON = 200

_WORTH_SAYING = 1.1
"""A slowest rank that takes at least so many times the median is reported."""

_LASTING = ("step", "train/loss", "train/tokens", "train/skipped_steps")
"""Tags that stay true of a run that has stopped."""

UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions that reading a damaged file may raise."""

T = TypeVar("T")


@dataclass(frozen=True)
class RunProgress:
    """The state of a run by its last log lines."""

    step: int | None
    """The last one that was logged."""

    steps: int | None
    """Of the whole run."""

    saved: int
    """Steps behind the newest checkpoint."""

    loss: float | None
    tokens_per_sec: float | None
    mfu: float | None

    seconds_left: float | None
    """At the speed of the last window."""

    heartbeat: float | None
    """Seconds since the first process last said where it is."""

    place: str | None
    """The phase that the first process was in then."""

    health: str
    """The slowest rank, waiting for data, steps without update; empty where nothing is amiss."""

    alive: bool
    """Whether the first process still tells where it is."""

    ended: str
    """The reason of its end that the run recorded last; empty without one."""

    unreadable: str
    """Files that cannot be read, and why; empty where there are none."""

    @classmethod
    def read(cls, run: Path, since: float = 0.0, step: int = 0) -> "RunProgress":
        """That of the run in a folder, which may be empty yet, and whose files may hold anything.

        since: seconds since 1970. step: of the run. What was told before then, or measured up to that step, is not
        shown as what is now: heartbeat, speed, time left, and who is slow.
        """
        problems: list[str] = []

        def part(name: str, read: Callable[[Path], T], otherwise: T) -> T:
            try:
                return read(run / name)
            except UNREADABLE as error:
                problems.append(why_unreadable(name, error))
                return otherwise

        nothing: dict[str, Any] = {}
        unknown: tuple[int | None, int | None] = None, None
        logged = part("metrics.jsonl", _last_logged, nothing)
        steps, tokens = part("config.yaml", lambda _: _whole(run), unknown)
        ended = part(events.FILE, lambda _: _ended(run), "")
        if _modified(run / "metrics.jsonl") < since or (logged.get("step") or 0) <= step:
            logged = {tag: value for tag, value in logged.items() if tag in _LASTING}
        beat = _heartbeat(run)
        if beat and beat["time"] < since:
            beat = {}
        alive = _is_alive(beat)
        speed, done = logged.get("throughput/tokens_per_sec"), logged.get("train/tokens")
        return cls(
            step=logged.get("step"),
            steps=steps,
            saved=saved_step(run),
            loss=logged.get("train/loss"),
            tokens_per_sec=speed,
            mfu=logged.get("throughput/mfu"),
            seconds_left=(tokens - done) / speed if tokens and done is not None and speed else None,
            heartbeat=max(0.0, time.time() - beat["time"]) if beat else None,
            place=beat.get("place"),
            health=_health(logged, beat.get("slowest", {}), alive),
            alive=alive,
            ended=ended,
            unreadable="; ".join(problems),
        )

    @property
    def of_all(self) -> str:
        """Steps done of all."""
        return "" if self.steps is None else f"{self.step or 0}/{self.steps}"

    @property
    def state(self) -> str:
        """RUNNING, DONE, FAILED, STOPPED or EMPTY (no step logged yet), where no scheduler is asked."""
        if self.alive:
            return "RUNNING"
        if self.steps is not None and self.saved >= self.steps:
            return "DONE"
        if self.ended:
            return "FAILED"
        return "EMPTY" if self.step is None else "STOPPED"


def saved_step(run: Path) -> int:
    """Optimizer steps behind the newest checkpoint; 0 where there is none."""
    try:
        return int((run / "checkpoints" / "latest").read_text().removeprefix("step_"))
    except (OSError, ValueError):
        return 0


def why_unreadable(name: str, error: Exception) -> str:
    """The reason why a file cannot be read, on one short line."""
    reason = " ".join(str((error.strerror if isinstance(error, OSError) else None) or error).split())
    return f"{name} cannot be read ({reason[:_MOST_OF_A_REASON]})"


def time_left(seconds: float | None) -> str:
    """Hours, minutes and seconds."""
    try:
        return "" if seconds is None else str(timedelta(seconds=round(seconds)))
    except OverflowError:
        return ""


def _health(logged: dict[str, Any], slowest: dict[str, Any], alive: bool) -> str:
    """Of a run that has ended only what stays true: who was slow in its last steps does not matter any more."""
    said = []
    straggle = logged.get("health/straggle") if alive else None
    if straggle is not None and straggle >= _WORTH_SAYING:
        rank = int(logged.get("health/slowest_rank", -1))
        host = f" on {slowest.get('host')}" if slowest.get("rank") == rank else ""
        said.append(f"rank {rank}{host} takes {straggle:.2f} x the median")
    share = logged.get("health/data_share") if alive else None
    if share is not None and share >= _WORTH_SAYING - 1:
        said.append(f"{share:.0%} of a step waits for data")
    if skipped := int(logged.get("train/skipped_steps") or 0):
        said.append(f"{skipped} step{'s' * (skipped > 1)} skipped")
    return ", ".join(said)


def _is_alive(beat: dict[str, Any]) -> bool:
    if not beat or time.time() - beat["time"] > _SILENT_SECONDS:
        return False
    return beat["host"] != socket.gethostname() or psutil.pid_exists(beat["process"])


def _ended(run: Path) -> str:
    """Why it failed, where that was its last event."""
    last = next(reversed(events.read(run)), None)
    return str(last.get("why", "")) if last is not None and last["event"] == "failed" else ""


def _whole(run: Path) -> tuple[int | None, int | None]:
    """Steps and tokens of the whole run."""
    try:
        found = (run / "config.yaml").stat()
    except FileNotFoundError:
        return None, None
    return _whole_by(run, (found.st_ino, found.st_mtime_ns))


@cache
def _whole_by(run: Path, version: tuple[int, int]) -> tuple[int, int]:
    """The same by one version of the file: whoever watches hundreds of runs need not parse them at each look."""
    config = recorded_config(run)
    steps = config.training.steps
    return steps, config.training.consumed(steps)[1] * config.model.sequences_per_sample


def _last_logged(metrics: Path) -> dict[str, Any]:
    """The newest value of every tag among the last lines, and the newest step."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - _TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    values: dict[str, Any] = {}
    for line in lines:
        try:
            parsed = json.loads(line)
        except ValueError:
            continue  # the first one is cut, the last one may be
        if isinstance(parsed, dict):
            values |= {tag: value for tag, value in parsed.items() if value is None or _is_number(value)}
    if len(lines) > 1 and not values:
        raise ValueError("no line of its end is one of metrics")
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _heartbeat(run: Path) -> dict[str, Any]:
    try:
        beat = json.loads((run / HEARTBEAT).read_text())
        process, slowest = int(beat["process"]), beat.get("slowest")
        if not 0 < process < 1 << 31:
            return {}
        known = {"time": float(beat["time"]), "host": str(beat["host"]), "process": process}
        return {**beat, **known, "slowest": slowest if isinstance(slowest, dict) else {}}
    except UNREADABLE:
        return {}
