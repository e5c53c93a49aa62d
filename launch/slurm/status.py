"""Where a run stands: what Slurm says of its jobs, what befell it, and what it last measured."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from launch.run_progress import UNREADABLE, RunProgress, time_left, why_unreadable
from megakernel.config import UserError

from .job_folder import JobFolder
from .live import states_of
from .states import JobState

_WHAT_HAPPENED = {
    "TIMEOUT": "reached its time limit before it could save",
    "NODE_FAIL": "a node was lost",
    "OUT_OF_MEMORY": "a process asked for more memory than the job has (--mem)",
    "PREEMPTED": "made room for another job",
    "CANCELLED": "cancelled",
    "BOOT_FAIL": "a node did not start",
    "DEADLINE": "could not end before its deadline",
}
"""What a state of Slurm says about why a job ended."""


@dataclass(frozen=True)
class RunStatus:
    """One run now."""

    run: str

    job: str
    """The job that runs, else the next that waits, else the last one."""

    state: str
    """Of that job, in Slurm's word."""

    why: str
    """Why it waits, or how it ended."""

    eta: str
    """When it is expected to start, or how long it will still train."""

    restarts: int
    """How often the job was started again."""

    step: int | None
    """The last one that was logged."""

    steps: int | None
    """Of the whole run."""

    saved: int
    """Steps behind the newest checkpoint."""

    stage: str | None
    """Of an up-training: which one trains, or was the last. Steps and speed are its own."""

    loss: float | None
    tokens_per_sec: float | None

    heartbeat: float | None
    """Seconds since the first process last said where it is; None while nothing runs."""

    place: str | None
    """Where that was."""

    health: str
    """The slowest rank, waiting for data, steps without update; empty where nothing is amiss."""

    nodes: str
    jobs: dict[str, str]
    """Every job with its state."""

    unreadable: str
    """Files of the run that cannot be read, and why; empty where there are none."""

    @property
    def progress(self) -> str:
        """Steps done of all."""
        return "" if self.steps is None else f"{self.step or 0}/{self.steps}"

    def as_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of what is known, for people."""
        beat = None if self.heartbeat is None else f"{self.heartbeat:.0f} s ago, in {self.place!r}"
        named = {
            "run": self.run,
            "job": self.job,
            "state": self.state,
            "why": self.why,
            "ETA": self.eta,
            "restarts": str(self.restarts),
            "stage": self.stage or "",
            "step": self.progress,
            "saved": f"step {self.saved}" if self.saved else "",
            "loss": "" if self.loss is None else f"{self.loss:.4f}",
            "tokens/s": "" if self.tokens_per_sec is None else f"{self.tokens_per_sec:,.0f}",
            "heartbeat": beat or "",
            "health": self.health,
            "unreadable": self.unreadable,
            "nodes": self.nodes,
            "jobs": ", ".join(f"{job} {state}" for job, state in self.jobs.items())
            if len(self.jobs) > 1
            else "",
        }
        return [(name, value) for name, value in named.items() if value]


def status_of(run: JobFolder, by_slurm: Mapping[str, JobState]) -> RunStatus:
    """By what Slurm has said of the run's jobs (`known_to_slurm`), and by the run's folder."""
    states = states_of(run, by_slurm)
    job = _current(states)
    events = run.events(job.job)
    started = [event for event in events if event["event"] == "started"]
    training = run.training
    known = RunProgress.read(training)
    runs = job.is_live and not job.is_pending
    return RunStatus(
        run=str(run.path),
        job=job.job,
        state=job.state,
        why=_why(job, events),
        eta=_eta(job, known.seconds_left),
        restarts=started[-1].get("restart", 0) if started else 0,
        step=known.step,
        steps=known.steps,
        saved=known.saved,
        stage=None if training == run.path else training.name,
        loss=known.loss,
        tokens_per_sec=known.tokens_per_sec,
        heartbeat=known.heartbeat if runs else None,
        place=known.place if runs else None,
        health=known.health,
        nodes=job.nodes or (started[-1].get("nodes", "") if started else ""),
        jobs={id: state.state for id, state in states.items()},
        unreadable=known.unreadable,
    )


def status_or_why(run: JobFolder, by_slurm: Mapping[str, JobState]) -> RunStatus:
    """`status_of`; of a run whose record cannot be read, why: it is one of many that are shown."""
    try:
        return status_of(run, by_slurm)
    except UNREADABLE as error:
        known = RunProgress.read(run.path)
        return RunStatus(
            run=str(run.path),
            job="",
            state="UNREADABLE",
            why=str(error) if isinstance(error, UserError) else why_unreadable(str(run.path), error),
            eta="",
            restarts=0,
            step=known.step,
            steps=known.steps,
            saved=known.saved,
            stage=None,
            loss=known.loss,
            tokens_per_sec=known.tokens_per_sec,
            heartbeat=None,
            place=None,
            health=known.health,
            nodes="",
            jobs={},
            unreadable=known.unreadable,
        )


def _current(states: dict[str, JobState]) -> JobState:
    live = [state for state in states.values() if state.is_live]
    running = [state for state in live if not state.is_pending]
    return (running or live or list(states.values())[-1:])[0]


def _why(job: JobState, events: list[dict[str, Any]]) -> str:
    if job.is_live:
        waits_again = job.is_pending and any(event["event"] == "ended" for event in events)
        before = f"{_last_end(events)}; " if waits_again else ""
        return before + (job.reason if job.is_pending else "")
    said = _last_end(events)
    if job.state in _WHAT_HAPPENED:
        return f"{_WHAT_HAPPENED[job.state]}{f' ({said})' if said else ''}"
    return said


def _last_end(events: list[dict[str, Any]]) -> str:
    ends = [str(event.get("why", "")) for event in events if event["event"] == "ended"]
    return ends[-1] if ends else ""


def _eta(job: JobState, seconds_left: float | None) -> str:
    if job.is_pending:
        return f"starts {job.start}" if job.start else ""
    if not job.is_live:
        return ""
    return time_left(seconds_left)
