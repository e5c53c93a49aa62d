"""Where runs stand, as `status` and `monitor` show it: what Slurm says of their jobs, and what they last measured."""

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

from launch.run_progress import UNREADABLE, RunProgress, saved_step, time_left, why_unreadable
from launch.slurm.job_folder import JobFolder
from launch.slurm.restarting import ENDED_ON_REQUEST
from launch.slurm.states import JobState, known_to_slurm, states_of
from launch.slurm_programs import SlurmRefused
from megakernel.config import UserError

_WHAT_HAPPENED = {
    "TIMEOUT": "reached its time limit before it could save",
    "NODE_FAIL": "a node was lost",
    "OUT_OF_MEMORY": "a process asked for more memory than the job has (--mem)",
    "PREEMPTED": "made room for another job",
    "CANCELLED": "cancelled",
    "BOOT_FAIL": "a node did not start",
    "DEADLINE": "could not end before its deadline",
}
"""State of Slurm -> why the job ended."""


@dataclass(frozen=True)
class RunStatus:
    """One run now."""

    run: Path

    known: RunProgress
    """How far it is; no heartbeat while nothing runs."""

    state: str
    """Of its job, in Slurm's word; of a run without one, that of its progress."""

    why: str
    """Why it waits, or how it ended."""

    job: str = ""
    """The job that runs, else the next that waits, else the last one."""

    eta: str = ""
    """When it is expected to start, or how long it will still train."""

    restarts: int = 0
    """How often the job was started again."""

    stage: str | None = None
    """Of an up-training: which one trains, or was the last. Steps and speed are its own."""

    nodes: str = ""
    jobs: Mapping[str, str] = field(default_factory=dict)
    """Every job with its state."""

    def as_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        told = asdict(self.known) | {name: value for name, value in vars(self).items() if name != "known"}
        return {name: told[name] for name in _IN_JSON} | {"run": str(self.run)}

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of what is known, for people."""
        known = self.known
        beat = "" if known.heartbeat is None else f"{known.heartbeat:.0f} s ago, in {known.place!r}"
        jobs = [f"{job} {state}" for job, state in self.jobs.items()]
        named = {
            "run": str(self.run),
            "job": self.job,
            "state": self.state,
            "why": self.why,
            "ETA": self.eta,
            "restarts": str(self.restarts),
            "stage": self.stage or "",
            "step": known.of_all,
            "saved": f"step {known.saved}" if known.saved else "",
            "loss": _CELLS["loss"](self),
            "tokens/s": _CELLS["tokens/s"](self),
            "heartbeat": beat,
            "health": known.health,
            "unreadable": known.unreadable,
            "nodes": self.nodes,
            "jobs": ", ".join(jobs) if len(jobs) > 1 else "",
        }
        return [(name, value) for name, value in named.items() if value]


_IN_JSON = (
    *("run", "job", "state", "why", "eta", "restarts", "step", "steps", "saved", "stage", "loss"),
    *("tokens_per_sec", "heartbeat", "place", "health", "nodes", "jobs", "unreadable"),
)


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


_CELLS: dict[str, Callable[[RunStatus], str]] = {
    "job": lambda run: run.job,
    "state": lambda run: run.state,
    "step": lambda run: run.known.of_all,
    "loss": lambda run: _shown(run.known.loss, ".4f"),
    "tokens/s": lambda run: _shown(run.known.tokens_per_sec, ",.0f"),
    "MFU": lambda run: _shown(run.known.mfu, ".1%"),
    "ETA": lambda run: time_left(run.known.seconds_left) if run.state == "RUNNING" else "",
    "restarts": lambda run: str(run.restarts),
    "why": lambda run: ", ".join(filter(None, (run.why, run.known.unreadable))),
    "remarks": lambda run: ", ".join(filter(None, (run.known.health, run.why, run.known.unreadable))),
}
_RIGHT = {"step", "loss", "tokens/s", "MFU", "ETA", "restarts"}


_DISPENSABLE = ("restarts", "MFU", "tokens/s", "loss", "ETA")
"""Columns that are left out where lines are short, the first one first."""

_LEAST_OF_LAST = 24
"""Characters of the last column, which is wrapped where it has more."""


def line_width() -> int | None:
    """Characters of a line on this terminal; None where the output goes elsewhere, unless COLUMNS says so."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() or os.environ.get("COLUMNS") else None


def table(found: Iterable[RunStatus], root: Path, columns: Sequence[str], width: int | None) -> str:
    """A line for each run, those under `root` named from there.

    width: characters of a line; the last column is wrapped, and others left out. None: one line for each, whole.
    """
    titles = ["run", *columns]
    rows = [titles]
    for status in found:
        name = status.run.relative_to(root) if status.run.is_relative_to(root) else status.run
        rows.append([str(name), *(" ".join(_CELLS[title](status).split()) for title in columns)])
    widths = {title: max(map(len, column)) for title, column in zip(titles, zip(*rows))}
    last = titles[-1]
    shown = list(titles[:-1])

    def left() -> int:
        return widths[last] if width is None else width - sum(widths[title] + 2 for title in shown)

    for title in _DISPENSABLE:
        if title in shown and left() < min(widths[last], _LEAST_OF_LAST):
            shown.remove(title)
    # Under the others, where a run's name leaves it no room beside them.
    is_below = left() < min(widths[last], _LEAST_OF_LAST)
    indent = " " * (4 if is_below else sum(widths[title] + 2 for title in shown))
    lines = []
    for row in rows:
        cells = dict(zip(titles, row))
        room = widths[last] + 1 if width is None else width - len(indent)
        parts = textwrap.wrap(cells[last], max(_LEAST_OF_LAST, room))
        first = "  ".join(
            f"{cells[title]:{'>' if title in _RIGHT else '<'}{widths[title]}}" for title in shown
        )
        beside = [] if is_below else [f"{first}  {''.join(parts[:1])}"]
        lines += [*(beside or [first]), *(indent + part for part in parts[len(beside) :])]
    return "\n".join(line.rstrip() for line in lines)


def statuses(runs: Sequence[JobFolder]) -> list[RunStatus]:
    """Of each of these runs; where Slurm does not answer by what is in their folders, and its complaint."""
    by_slurm: Mapping[str, JobState] = {}
    complaint = ""
    try:
        by_slurm = known_to_slurm(run for run in runs if run.exists)
    except SlurmRefused as error:
        complaint = str(error)

    def needs_slurm(run: JobFolder) -> bool:
        return any(job.executor == "slurm" for job in run.jobs_if_readable())

    return [
        _without_slurm(run, complaint) if complaint and needs_slurm(run) else status_of(run, by_slurm)
        for run in runs
    ]


def status_of(run: JobFolder, by_slurm: Mapping[str, JobState]) -> RunStatus:
    """By what Slurm has said of the run's jobs (`known_to_slurm`), and by the run's folder, whatever its files hold."""
    if not run.exists:
        return status_of_folder(run)
    try:
        return _of_jobs(run, states_of(run, by_slurm))
    except UNREADABLE as error:
        known = replace(RunProgress.read(run.path), heartbeat=None, place=None)
        why = str(error) if isinstance(error, UserError) else why_unreadable(str(run.path), error)
        return RunStatus(run.path, known, "UNREADABLE", why)


def status_of_folder(run: JobFolder) -> RunStatus:
    """By the run's folder alone."""
    known = RunProgress.read(run.training)
    return RunStatus(run.path, known, known.state, known.ended)


def _without_slurm(run: JobFolder, complaint: str) -> RunStatus:
    """By the run's folder, with its last job, and why Slurm says nothing of that."""
    status, job = status_of_folder(run), run.jobs()[-1].id
    try:
        told = run.events(job)
    except UNREADABLE:
        told = []
    why = "; ".join(filter(None, (_last_end(told), complaint)))
    return replace(status, why=why, job=job, restarts=_restarts(_starts(told)))


def _starts(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "started"]


def _restarts(started: list[dict[str, Any]]) -> int:
    return started[-1].get("restart", 0) if started else 0


def _of_jobs(run: JobFolder, states: dict[str, JobState]) -> RunStatus:
    job = _current(states)
    events = run.events(job.job)
    started = _starts(events)
    training = run.training
    known = RunProgress.read(training, *_begin(run, job, started))
    if not job.is_live:
        known = replace(known, heartbeat=None, place=None)
    return RunStatus(
        run=run.path,
        known=known,
        job=job.job,
        state=job.state,
        why=_why(run, job, events),
        eta=_eta(job, known.seconds_left),
        restarts=_restarts(started),
        stage=None if training == run.path else str(training.relative_to(run.path)),
        nodes=job.nodes or (started[-1].get("nodes", "") if started and not job.is_pending else ""),
        jobs={id: state.state for id, state in states.items()},
    )


def _begin(run: JobFolder, job: JobState, started: list[dict[str, Any]]) -> tuple[float, int]:
    """From when, and behind which step, on what the run tells is of now."""
    if job.is_pending:
        return math.inf, 0
    if not started or not job.is_live:
        return 0.0, 0
    of_other_stages = run.saved_steps() - saved_step(run.training)
    begun = datetime.fromisoformat(started[-1]["time"]).timestamp()
    return begun, started[-1].get("step", 0) - of_other_stages


def _current(states: dict[str, JobState]) -> JobState:
    live = [state for state in states.values() if state.is_live]
    running = [state for state in live if not state.is_pending]
    return (running or live or list(states.values())[-1:])[0]


def _why(run: JobFolder, job: JobState, events: list[dict[str, Any]]) -> str:
    if job.is_live:
        now = job.reason if job.is_pending else _waits_for(events)
        return "; ".join(filter(None, (_last_end(events) if job.is_pending or now else "", now)))
    said = _last_end(events)
    if job.state in _WHAT_HAPPENED and said != ENDED_ON_REQUEST:
        return f"{_WHAT_HAPPENED[job.state]}{f' ({said})' if said else ''}"
    # A start that cannot begin, such as one without its Python, says nothing itself.
    marks = [event["event"] for event in events if event["event"] in ("started", "ended", "requeued")]
    log = run.path / "logs" / f"{job.job}.log"
    if job.state == "FAILED" and marks[-1:] != ["ended"] and log.exists():
        return f"ended without a word; {log} may say why"
    return said


def _waits_for(events: list[dict[str, Any]]) -> str:
    """Why a job that runs trains nothing."""
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
