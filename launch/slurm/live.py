"""Which jobs of a run wait or run."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from launch.exit_status import ExitStatus

from .job_folder import Job, JobFolder
from .states import JobState, job_states


def known_to_slurm(runs: Iterable[JobFolder]) -> dict[str, JobState]:
    """The jobs of these runs that Slurm knows, asked once for all. Raises SlurmRefused where it cannot be reached."""
    return job_states(job.id for run in runs for job in run.jobs_if_readable() if job.executor == "slurm")


def states_of(run: JobFolder, known: Mapping[str, JobState] | None = None) -> dict[str, JobState]:
    """Every job of a run with its state, oldest first; where nobody knows it, what its events say.

    known: what Slurm has said of jobs; None asks it.
    """
    if known is None:
        known = known_to_slurm([run])
    return {job.id: known.get(job.id) or _by_its_record(run, job) for job in run.jobs()}


def live_jobs(run: JobFolder) -> dict[str, str]:
    """Job -> state, of those that wait or run."""
    return {job: state.state for job, state in states_of(run).items() if state.is_live}


class Watch:
    """Some jobs of some runs, asked about often; Slurm is asked every few seconds at most."""

    def __init__(self, jobs: Mapping[JobFolder, Sequence[Job]]):
        from .executor import ScriptJob  # submitit takes its time to import

        self._of_slurm: list[ScriptJob] = []
        self._others: list[tuple[JobFolder, Job]] = []
        for run, some in jobs.items():
            for job in some:
                if job.executor == "slurm":
                    self._of_slurm.append(ScriptJob(run.submission(job.submission), job.id))
                else:
                    self._others.append((run, job))

    def any_live(self) -> bool:
        """Whether one of them waits or runs."""
        return not all(job.done() for job in self._of_slurm) or any(
            _by_its_record(run, job).is_live for run, job in self._others
        )


def _by_its_record(run: JobFolder, job: Job) -> JobState:
    """The state of a job that no program of Slurm knows: one of this machine, or one that ended long ago."""
    if job.executor != "slurm" and _runs_here(job.id, run.submission(job.submission)):
        return JobState(job.id, "RUNNING", nodes="this machine")
    ended = [event for event in run.events(job.id) if event["event"] in ("started", "ended", "cancelled")]
    if not ended or ended[-1]["event"] == "started":
        return JobState(job.id, "UNKNOWN" if job.executor == "slurm" else "FAILED")
    if ended[-1]["event"] == "cancelled" or ended[-1]["status"] == ExitStatus.TERMINATED:
        return JobState(job.id, "CANCELLED")
    return JobState(job.id, "FAILED" if ended[-1]["status"] else "COMPLETED")


def _runs_here(process: str, submission: Path) -> bool:
    """Whether that process is still the one of the submission: ids are given again."""
    try:
        return str(submission.absolute()).encode() in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False
