"""The status of runs for `status` and `monitor`: job states from Slurm, progress from the run folders."""

import math
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from launch.messages import printable
from launch.run_progress import UNREADABLE, RunProgress, saved_step, time_left, why_unreadable
from launch.slurm.job_folder import JobFolder
from launch.slurm.restarting import ENDED_ON_REQUEST
from launch.slurm.states import JobState, job_states, query_slurm
from launch.slurm_programs import SlurmRefused
from megakernel.config import UserError
from megakernel.training.observing.console import decimal

_END_REASONS = {
    "TIMEOUT": "reached its time limit before it could save",
    "NODE_FAIL": "a node was lost",
    "OUT_OF_MEMORY": "a process asked for more memory than the job has (--mem)",
    "PREEMPTED": "made room for another job and was not requeued; `megakernel resume` continues the run",
    "CANCELLED": "cancelled",
    "BOOT_FAIL": "a node did not start",
    "DEADLINE": "could not end before its deadline",
}
"""Slurm's state of an ended job -> why it ended."""


@dataclass(frozen=True)
class RunStatus:
    """The current status of one run."""

    run: Path

    progress: RunProgress
    """The run's progress; without a heartbeat unless its job is live."""

    state: str
    """Slurm's state of the job; `RunProgress.state` for a run without a job."""

    why: str
    """Why the job waits, or how it ended."""

    job: str = ""
    """The running job, else the next pending one, else the last one."""

    eta: str = ""
    """When the job is expected to start, or how long it will still train."""

    restarts: int = 0
    """How often the job was restarted."""

    stage: str | None = None
    """The current or last stage of an up-training; steps and speed are those of the stage."""

    nodes: str = ""
    jobs: Mapping[str, str] = field(default_factory=dict)
    """Every job -> its state."""

    def as_dict(self) -> dict[str, Any]:
        """The fields of `status --json` and `monitor --json`."""
        values = asdict(self.progress) | {
            name: value for name, value in vars(self).items() if name != "progress"
        }
        return {name: values[name] for name in _JSON_KEYS} | {"run": str(self.run)}

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each nonempty field, for a terminal."""
        progress = self.progress
        beat = "" if progress.heartbeat is None else f"{progress.heartbeat:.0f} s ago, in {progress.place!r}"
        jobs = [f"{job} {state}" for job, state in self.jobs.items()]
        named = {
            "run": str(self.run),
            "job": self.job,
            "state": self.state,
            "why": self.why,
            "ETA": self.eta,
            "restarts": str(self.restarts),
            "stage": self.stage or "",
            "step": progress.step_of_steps,
            "saved": f"step {progress.saved}" if progress.saved else "",
            "loss": _CELLS["loss"](self),
            "eval": _CELLS["eval"](self),
            "tokens/s": _CELLS["tokens/s"](self),
            "heartbeat": beat,
            "GPUs": progress.gpus,
            "health": progress.health,
            "unreadable": progress.unreadable,
            "nodes": self.nodes,
            "jobs": ", ".join(jobs) if len(jobs) > 1 else "",
        }
        return [(name, value) for name, value in named.items() if value]


_JSON_KEYS = (
    *(
        "run",
        "job",
        "state",
        "why",
        "eta",
        "restarts",
        "step",
        "steps",
        "saved",
        "stage",
        "loss",
        "eval_loss",
    ),
    *("tokens_per_sec", "heartbeat", "place", "health", "gpus", "nodes", "jobs", "unreadable"),
)


def _formatted(value: float | None, format_spec: str) -> str:
    return "" if value is None else format(value, format_spec)


_CELLS: dict[str, Callable[[RunStatus], str]] = {
    "job": lambda run: run.job,
    "state": lambda run: run.state,
    "step": lambda run: run.progress.step_of_steps,
    "loss": lambda run: "" if run.progress.loss is None else decimal(run.progress.loss),
    "eval": lambda run: "" if run.progress.eval_loss is None else decimal(run.progress.eval_loss),
    "tokens/s": lambda run: _formatted(run.progress.tokens_per_sec, ",.0f"),
    "MFU": lambda run: _formatted(run.progress.mfu, ".1%"),
    "ETA": lambda run: time_left(run.progress.seconds_left) if run.state == "RUNNING" else "",
    "restarts": lambda run: str(run.restarts),
    "why": lambda run: ", ".join(filter(None, (run.why, run.progress.unreadable))),
    "remarks": lambda run: ", ".join(filter(None, (run.progress.health, run.why, run.progress.unreadable))),
}
_RIGHT = {"step", "loss", "eval", "tokens/s", "MFU", "ETA", "restarts"}


_DROPPABLE = ("restarts", "MFU", "tokens/s", "eval", "loss", "ETA")
"""Columns that are dropped on narrow terminals, in this order."""

_MIN_LAST_WIDTH = 24
"""Least width of the last column, in characters; longer text is wrapped."""


def line_width() -> int | None:
    """Characters per line of the terminal, or COLUMNS; None if stdout is no terminal and COLUMNS is not set."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() or os.environ.get("COLUMNS") else None


def table(runs: Iterable[RunStatus], root: Path, columns: Sequence[str], width: int | None) -> str:
    """A table with a row for each run; runs under `root` are named relative to it.

    width: characters per line: the last column is wrapped and others may be dropped. None: one whole line per run.
    """
    titles = ["run", *columns]
    rows = [titles]
    for status in runs:
        name = status.run.relative_to(root) if status.run.is_relative_to(root) else status.run
        values = (_CELLS[title](status) for title in columns)
        rows.append([printable(str(name)), *(printable(" ".join(value.split())) for value in values)])
    widths = {title: max(map(len, column)) for title, column in zip(titles, zip(*rows))}
    last = titles[-1]
    first_columns = list(titles[:-1])

    def room_for_last() -> int:
        return widths[last] if width is None else width - sum(widths[title] + 2 for title in first_columns)

    for title in _DROPPABLE:
        if title in first_columns and room_for_last() < min(widths[last], _MIN_LAST_WIDTH):
            first_columns.remove(title)
    # The last column goes below the others if a long run name leaves it no room beside them.
    is_below = room_for_last() < min(widths[last], _MIN_LAST_WIDTH)
    indent = " " * (4 if is_below else sum(widths[title] + 2 for title in first_columns))
    lines = []
    for row in rows:
        cells = dict(zip(titles, row))
        room = widths[last] + 1 if width is None else width - len(indent)
        parts = textwrap.wrap(cells[last], max(_MIN_LAST_WIDTH, room))
        first = "  ".join(
            f"{cells[title]:{'>' if title in _RIGHT else '<'}{widths[title]}}" for title in first_columns
        )
        if not is_below:
            first += f"  {''.join(parts[:1])}"
            parts = parts[1:]
        lines += [first, *(indent + part for part in parts)]
    return "\n".join(line.rstrip() for line in lines)


def statuses(runs: Sequence[JobFolder]) -> list[RunStatus]:
    """The status of each run; from its folder, with Slurm's error, if Slurm does not answer."""
    by_slurm: Mapping[str, JobState] = {}
    slurm_error = ""
    try:
        by_slurm = query_slurm(run for run in runs if run.exists)
    except SlurmRefused as error:
        slurm_error = str(error)

    def needs_slurm(run: JobFolder) -> bool:
        return any(job.executor == "slurm" for job in run.jobs_if_readable())

    return [
        _without_slurm(run, slurm_error) if slurm_error and needs_slurm(run) else status_of(run, by_slurm)
        for run in runs
    ]


def status_of(run: JobFolder, by_slurm: Mapping[str, JobState]) -> RunStatus:
    """The status by Slurm's states of the run's jobs (`query_slurm`) and by the run's folder, even a damaged one."""
    if not run.exists:
        return status_of_folder(run)
    try:
        return _of_jobs(run, job_states(run, by_slurm))
    except UNREADABLE as error:
        progress = replace(RunProgress.read(run.path), heartbeat=None, place=None)
        why = str(error) if isinstance(error, UserError) else why_unreadable(str(run.path), error)
        return RunStatus(run.path, progress, "UNREADABLE", why)


def status_of_folder(run: JobFolder) -> RunStatus:
    """The status by the run's folder alone."""
    progress = RunProgress.read(run.training)
    return RunStatus(run.path, progress, progress.state, progress.ended)


def _without_slurm(run: JobFolder, slurm_error: str) -> RunStatus:
    """The status by the run's folder and last job, with the error of the query to Slurm."""
    status, job = status_of_folder(run), run.jobs()[-1].id
    try:
        events = run.events(job)
    except UNREADABLE:
        events = []
    why = "; ".join(filter(None, (_last_end(events), slurm_error)))
    return replace(status, why=why, job=job, restarts=_restarts(_starts(events)))


def _starts(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "started"]


def _restarts(started: list[dict[str, Any]]) -> int:
    return started[-1].get("restart", 0) if started else 0


def _of_jobs(run: JobFolder, states: dict[str, JobState]) -> RunStatus:
    job = _current_job(states)
    events = run.events(job.job)
    started = _starts(events)
    training = run.training
    progress = RunProgress.read(training, *_current_start(run, job, started))
    if not job.is_live:
        progress = replace(progress, heartbeat=None, place=None)
    return RunStatus(
        run=run.path,
        progress=progress,
        job=job.job,
        state=job.state,
        why=_why(run, job, events),
        eta=_eta(job, progress.seconds_left),
        restarts=_restarts(started),
        stage=None if training == run.path else str(training.relative_to(run.path)),
        nodes=job.nodes or (started[-1].get("nodes", "") if started and not job.is_pending else ""),
        jobs={id: state.state for id, state in states.items()},
    )


def _current_start(run: JobFolder, job: JobState, started: list[dict[str, Any]]) -> tuple[float, int]:
    """Time and step at which the current start began: what the run wrote before is stale (`RunProgress.read`)."""
    if job.is_pending:
        return math.inf, 0
    if not started or not job.is_live:
        return 0.0, 0
    of_other_stages = run.saved_steps() - saved_step(run.training)
    begun = datetime.fromisoformat(started[-1]["time"]).timestamp()
    return begun, started[-1].get("step", 0) - of_other_stages


def _current_job(states: dict[str, JobState]) -> JobState:
    live = [state for state in states.values() if state.is_live]
    running = [state for state in live if not state.is_pending]
    return (running or live or list(states.values())[-1:])[0]


def _why(run: JobFolder, job: JobState, events: list[dict[str, Any]]) -> str:
    if job.is_live:
        waits = job.reason if job.is_pending else _waits_for(events)
        return "; ".join(filter(None, (_last_end(events) if job.is_pending or waits else "", waits)))
    end_reason = _last_end(events)
    if job.state in _END_REASONS and not (job.state == "CANCELLED" and end_reason == ENDED_ON_REQUEST):
        return f"{_END_REASONS[job.state]}{f' ({end_reason})' if end_reason else ''}"
    # A start that fails before its first event, for example without its Python, leaves only the batch log.
    phases = [event["event"] for event in events if event["event"] in ("started", "ended", "requeued")]
    log = run.path / "logs" / f"{job.job}.log"
    if job.state == "FAILED" and phases[-1:] != ["ended"] and log.exists():
        return f"ended without recording why; see {log}"
    return end_reason


def _waits_for(events: list[dict[str, Any]]) -> str:
    """Why a running job does not train; empty if it does."""
    last = events[-1] if events else {"event": ""}
    return f"waits until Slurm gives up {', '.join(last['nodes'])}" if last["event"] == "waits" else ""


def _last_end(events: list[dict[str, Any]]) -> str:
    ends = [str(event.get("why", "")) for event in events if event["event"] == "ended"]
    return ends[-1] if ends else ""


def _eta(job: JobState, seconds_left: float | None) -> str:
    if job.is_pending:
        return f"starts {job.start}" if job.start else ""
    if not job.is_live:
        return ""
    return time_left(seconds_left)
