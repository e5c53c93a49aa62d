"""The progress of a run, from the files in its folder."""

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
"""Bytes that are read from the end of metrics.jsonl."""

_SILENT_SECONDS = 6 * BEAT_SECONDS
"""A process is considered dead after this long without a heartbeat."""

_MAX_REASON_LENGTH = 200

_SLOW_RATIO = 1.1
"""Report the slowest rank if it takes at least this multiple of the median step, and waiting for data if it takes at
least a tenth of a step (this minus 1)."""

_LASTING_TAGS = ("step", "train/loss", "eval/loss", "train/tokens", "train/skipped_steps")
"""Tags that remain valid after a run has stopped."""

UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions that reading a damaged file may raise."""

T = TypeVar("T")


@dataclass(frozen=True)
class RunProgress:
    """The state of a run by its last log lines."""

    step: int | None
    """Last logged step."""

    steps: int | None
    """Steps of the whole run."""

    saved: int
    """Step of the newest checkpoint; 0 without one."""

    loss: float | None
    eval_loss: float | None
    tokens_per_sec: float | None
    mfu: float | None

    seconds_left: float | None
    """At the speed of the last logging window."""

    heartbeat: float | None
    """Seconds since the last heartbeat of rank 0."""

    place: str | None
    """Phase of rank 0 at that heartbeat."""

    health: str
    """The slowest rank, waiting for data, skipped steps, faults of GPUs; empty if there is nothing to report."""

    gpus: str
    """Use, power, clock, temperature and memory of the GPUs; empty if they are not logged."""

    alive: bool
    """Whether rank 0 still runs and writes heartbeats."""

    ended: str
    """Why the run failed, if that is its last event; otherwise empty."""

    unreadable: str
    """Files that cannot be read, and why; empty if all can."""

    @classmethod
    def read(cls, run: Path, since: float = 0.0, step: int = 0) -> "RunProgress":
        """Read the progress from a run's folder, which may be empty and whose files may be damaged.

        since: Unix time of the current start. step: the step that it began from. Older heartbeats, speeds, times left
        and slow ranks are left out.
        """
        problems: list[str] = []

        def part(name: str, read: Callable[[Path], T], otherwise: T) -> T:
            try:
                return read(run / name)
            except UNREADABLE as error:
                problems.append(why_unreadable(name, error))
                return otherwise

        empty: dict[str, Any] = {}
        unknown: tuple[int | None, int | None] = None, None
        logged = part("metrics.jsonl", _last_logged, empty)
        steps, tokens = part("config.yaml", lambda _: _totals(run), unknown)
        ended = part(events.FILE, lambda _: _ended(run), "")
        if _modified(run / "metrics.jsonl") < since or (logged.get("step") or 0) <= step:
            logged = {tag: value for tag, value in logged.items() if tag in _LASTING_TAGS}
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
            eval_loss=logged.get("eval/loss"),
            tokens_per_sec=speed,
            mfu=logged.get("throughput/mfu"),
            seconds_left=(tokens - done) / speed if tokens and done is not None and speed else None,
            heartbeat=max(0.0, time.time() - beat["time"]) if beat else None,
            place=beat.get("place"),
            health=_health(logged, beat, alive),
            gpus=_gpus(logged),
            alive=alive,
            ended=ended,
            unreadable="; ".join(problems),
        )

    @property
    def step_of_steps(self) -> str:
        """`STEP/STEPS`; empty if the number of steps is unknown."""
        return "" if self.steps is None else f"{self.step or 0}/{self.steps}"

    @property
    def state(self) -> str:
        """RUNNING, DONE, FAILED, STOPPED or EMPTY (no step logged yet), for a run without a scheduler."""
        if self.alive:
            return "RUNNING"
        if self.steps is not None and self.saved >= self.steps:
            return "DONE"
        if self.ended:
            return "FAILED"
        return "EMPTY" if self.step is None else "STOPPED"


def saved_step(run: Path) -> int:
    """Optimizer step of the newest checkpoint; 0 without one."""
    try:
        return int((run / "checkpoints" / "latest").read_text().removeprefix("step_"))
    except (OSError, ValueError):
        return 0


def why_unreadable(name: str, error: Exception) -> str:
    """One short line that says why a file cannot be read."""
    reason = " ".join(str((error.strerror if isinstance(error, OSError) else None) or error).split())
    return f"{name} cannot be read ({reason[:_MAX_REASON_LENGTH]})"


def time_left(seconds: float | None) -> str:
    """A duration as H:MM:SS; empty if it is unknown or too large."""
    try:
        return "" if seconds is None else str(timedelta(seconds=round(seconds)))
    except OverflowError:
        return ""


def _gpus(logged: dict[str, Any]) -> str:
    """The state of the GPUs in a few words, without what they do not tell."""
    words = {
        "gpu/utilization": "{:.0f} % busy",
        "gpu/power_w": "{:,.0f} W",
        "gpu/sm_clock_mhz": "{:,.0f} MHz",
        "gpu/temperature_c": "at most {:.0f} °C",
        "gpu/memory_gib": "at most {:.1f} GiB",
    }
    known = {tag: text for tag, text in words.items() if logged.get(tag) is not None}
    return ", ".join(text.format(logged[tag]) for tag, text in known.items())


def _health(logged: dict[str, Any], beat: dict[str, Any], alive: bool) -> str:
    """Slowest rank, waiting for data, faults of GPUs and skipped steps; after the end of a run only the last."""
    remarks = []
    slowest = beat.get("slowest", {})
    straggle = logged.get("health/straggle") if alive else None
    if straggle is not None and straggle >= _SLOW_RATIO:
        rank = int(logged.get("health/slowest_rank", -1))
        host = f" on {slowest.get('host')}" if slowest.get("rank") == rank else ""
        remarks.append(f"rank {rank}{host} takes {straggle:.2f} x the median")
    share = logged.get("health/data_share") if alive else None
    if share is not None and share >= _SLOW_RATIO - 1:
        remarks.append(f"{share:.0%} of a step waits for data")
    if alive and (faults := beat.get("gpus")):
        remarks.append(str(faults))
    if skipped := int(logged.get("train/skipped_steps") or 0):
        remarks.append(f"{skipped} step{'s' * (skipped > 1)} skipped")
    return ", ".join(remarks)


def _is_alive(beat: dict[str, Any]) -> bool:
    if not beat or time.time() - beat["time"] > _SILENT_SECONDS:
        return False
    return beat["host"] != socket.gethostname() or psutil.pid_exists(beat["process"])


def _ended(run: Path) -> str:
    """Why the run failed, if that is its last event."""
    last = next(reversed(events.read(run)), None)
    return str(last.get("why", "")) if last is not None and last["event"] == "failed" else ""


def _totals(run: Path) -> tuple[int | None, int | None]:
    """Steps and tokens of the whole run."""
    try:
        file = (run / "config.yaml").stat()
    except FileNotFoundError:
        return None, None
    return _cached_totals(run, (file.st_ino, file.st_mtime_ns))


@cache
def _cached_totals(run: Path, version: tuple[int, int]) -> tuple[int, int]:
    """The same, cached per version of config.yaml: watching hundreds of runs should not parse them over and over."""
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
            continue  # the first line is cut off, and the last one may be incomplete
        if isinstance(parsed, dict):
            values |= {tag: value for tag, value in parsed.items() if _is_finite_or_none(value)}
    if len(lines) > 1 and not values:
        raise ValueError("none of its last lines has metrics")
    return values


def _is_finite_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and math.isfinite(value))


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
