"""Submits jobs; a refused submission leaves no files behind."""

import compileall
import io
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import submitit
from submitit import SlurmExecutor, SlurmJob
from submitit.core.utils import FailedJobError, FailedSubmissionError

from launch.exit_status import ExitStatus
from launch.local import import_variables
from launch.shipped import REPOSITORY
from launch.slurm_programs import SlurmRefused, call, foreign_variables, require
from megakernel.config import UserError
from megakernel.training import events
from megakernel.training.environment import REVISION_FILE, git, revision
from megakernel.training.run_folder import LEASE_SECONDS, RunLock

from . import log_files
from .attempt import run_here
from .job_folder import Job, JobFolder, Settings, write_settings
from .refusals import explain_refusal
from .script import Script
from .states import refuse_live

CONFIG = "config.yaml"


@dataclass(frozen=True)
class Member:
    """One run of a submission: the only one, or one per index of an array."""

    run: Path

    config: str | None = None
    """The resolved configuration as YAML; None for a command without one."""

    index: int | None = None
    """Index in the array."""


@dataclass(frozen=True)
class Request(Script):
    """A submission to make; all its jobs run the same script."""

    members: Sequence[Member] = ()

    def folder(self, member: Member) -> Path:
        """The submission's folder in a member's run."""
        return JobFolder(member.run).submission(self.submission)

    def after(self, job: str) -> "Request":
        """The same request, to start after a job has ended."""
        return replace(self, options={**self.options, "dependency": f"afterany:{job}"})


def new_submission_name() -> str:
    """A name for a submission: the time, UTC."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime())


def test(request: Request) -> str:
    """The answer of `sbatch --test-only`; nothing is submitted. Raises SlurmRefused."""
    done = call(["sbatch", "--test-only"], input_text=request.text())
    if done.returncode:
        raise _refusal(done.stderr, request)
    return done.stderr.strip().removeprefix("sbatch: ")


def submit(request: Request) -> list[Job]:
    """Submit and record the jobs; returns them by position in the chain, then by member.

    Raises UserError if a member has a live job, SlurmRefused if Slurm refuses the job; then all files are removed and
    jobs of the chain that were already submitted are cancelled.
    """
    with _locked(request):
        for member in request.members:
            _refuse_trained(member)
        refuse_live([JobFolder(member.run) for member in request.members])
        _write(request)
        if request.cluster.executor == "slurm":
            return _submit_to_slurm(request)
        started = _start_locally(request)
        jobs = _record_jobs(started.job_id, request)
    if request.cluster.executor == "debug":
        started.result()  # runs the job, outside of the block so that its files stay if it fails
    return jobs


def _write(request: Request) -> None:
    cluster = request.cluster.model_dump(mode="json")
    settings = Settings(list(request.command), cluster, request.run.name, request.chain)
    code: Path | None = None
    for member in request.members:
        folder = request.folder(member)
        try:
            folder.mkdir(mode=0o700, parents=True)  # it may hold secrets
            (member.run / "logs").mkdir(exist_ok=True)
            write_settings(folder, settings)
            if member.config is not None:
                (folder / CONFIG).write_text(member.config, encoding="utf-8")
            if code is None:
                code = write_snapshot(folder / "code")
            else:
                (folder / "code").symlink_to(code.absolute())
            _make_private(folder)
        except FileExistsError:
            raise UserError(
                f"{member.run} was submitted less than a second ago; see megakernel status {member.run}"
            ) from None
        except OSError as error:
            raise _unwritable(member.run, error) from None


def _unwritable(run: Path, error: OSError) -> UserError:
    return UserError(f"{run} cannot hold the run ({error}); make it writable or choose another run.root")


def _make_private(folder: Path) -> None:
    """Make all files in the folder readable by their owner only."""
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)


_TRACKED_CODE = ("megakernel/*", "launch/*", "data_pipeline/*", "benchmarks/*.py", "slurm/*")
"""Tracked files that a snapshot copies; other files may be data."""

_UNTRACKED_CODE = tuple(f"{name}/*.py" for name in ("megakernel", "launch", "data_pipeline", "benchmarks"))
"""Untracked files that a snapshot copies; other files may be secrets."""


def write_snapshot(folder: Path, repository: Path = REPOSITORY) -> Path:
    """Copy the current code, for the job to run, and write revision.txt; without a checkout only the latter.

    Returns the folder.
    """
    folder.mkdir()
    (folder / REVISION_FILE).write_text(revision(repository / "launch" / "cli.py") + "\n")
    tracked = git(repository, "ls-files", "-z", "--", *_TRACKED_CODE) or ""
    new = git(repository, "ls-files", "--others", "--exclude-standard", "-z", "--", *_UNTRACKED_CODE) or ""
    for name in {*tracked.split("\0"), *new.split("\0")}:
        if (source := repository / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
    # Otherwise each process of the job would compile the modules at its start, and write what the others write, too.
    compileall.compile_dir(folder, quiet=2)
    return folder


def _submit_to_slurm(request: Request) -> list[Job]:
    ids: list[str] = []
    try:
        for _ in range(request.chain):
            text = (request.after(ids[-1]) if ids else request).text()
            with tempfile.TemporaryDirectory() as scratch:  # submitit replaces %j in names of folders
                submitted = ScriptExecutor(Path(scratch), text).submit_script()
                ids.append(submitted.job_id)
                for member in request.members:
                    shutil.copy(submitted.paths.submission_file, request.folder(member))
        for member in request.members:
            _make_private(request.folder(member))
        return [job for id in ids for job in _record_jobs(id, request)]
    except BaseException as error:
        if ids:
            call(["scancel", *ids])
        if isinstance(error, _SbatchFailed):
            raise _refusal(str(error), request) from None
        raise


class _SbatchFailed(SlurmRefused):
    """sbatch failed; the text is its stderr."""


class ScriptExecutor(SlurmExecutor):
    """A submitit executor for our own batch script: writes it, passes it to sbatch and reads the job id.

    submitit's own script is one srun of a pickled function, which does not suffice: our script checks the nodes and
    sets the rendezvous address before srun, and decides after it whether to requeue, by how all processes ended, while
    submitit's handler requeues as soon as one process gets a signal. Members of an array have a folder each, and
    containers, secrets and a command line that Slurm's tools show do not fit into a pickle. submitit's `Job` needs
    accounting for states, which not every cluster has, and pickles for results: `states` is used instead.

    folder: for submitit's files. script: the whole text of the batch script.
    """

    def __init__(self, folder: Path, script: str):
        require("sbatch")
        super().__init__(folder)
        self._script = script

    def submit_script(self) -> SlurmJob[None]:
        """Submit, and return the job with its id and files. Raises SlurmRefused with sbatch's stderr."""
        stderr = io.StringIO()
        try:
            with redirect_stderr(stderr):  # submitit prints there before it raises
                return self._submit_command("")
        except (FailedJobError, FailedSubmissionError) as error:
            raise _SbatchFailed(str(error) or stderr.getvalue()) from None

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        unset = [option for name in foreign_variables() for option in ("-u", name)]
        return ["env", *unset, "sbatch", str(submission_file_path)]


def _record_jobs(job: str, request: Request) -> list[Job]:
    jobs = []
    for member in request.members:
        name = job if member.index is None else f"{job}_{member.index}"
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        jobs.append(Job(name, request.cluster.executor, request.submission, now))
        JobFolder(member.run).add(jobs[-1:])
        events.record(member.run, "submitted", env={events.JOB_VARIABLE: name}, submission=request.submission)
    return jobs


def _start_locally(request: Request) -> submitit.Job[int]:
    """submitit's job on this machine; with its debug executor it runs when `result` is called."""
    folder = request.folder(request.members[0]).absolute()
    if request.cluster.executor == "debug":
        return submitit.DebugExecutor(folder).submit(run_here, folder)
    executor = submitit.LocalExecutor(folder)
    # Its time limit would be one of all starts together.
    executor.update_parameters(gpus_per_node=request.cluster.gpus_per_node, timeout_min=_NO_LIMIT)
    # submitit would make it the machine's first GPUs.
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") if request.cluster.gpus_per_node else None
    os.environ.update(import_variables())
    log = folder / "log"
    with _in_background(log):
        job = executor.submit(run_here, folder, gpus)
    log.rename(request.run / "logs" / f"{job.job_id}.log")  # as of a batch script
    return job


@contextmanager
def _in_background(log: Path) -> Iterator[None]:
    """Start processes that outlive this command, with `log` as their output.

    Ctrl-C and a closed terminal do not end them, and a reader of this command does not wait for them.
    """
    ignored = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    streams = {number: os.dup(number) for number in (1, 2)}
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        for number in streams:
            os.dup2(file, number)
        yield
    finally:
        for number, saved in streams.items():
            os.dup2(saved, number)
            os.close(saved)
        os.close(file)
        for number, handler in ignored.items():
            signal.signal(number, handler)


_NO_LIMIT = 60.0 * 24 * 365
"""Minutes; submitit's default limit is two minutes."""


def _refuse_trained(member: Member) -> None:
    """Refuse a command in the folder of a training run: as the run's last job it would break `resume`."""
    trained = (member.run / CONFIG).exists() or any(member.run.glob(f"submissions/*/{CONFIG}"))
    if member.config is None and trained:
        raise UserError(f"{member.run} is a training run; choose another --name for the command")


def _refusal(stderr: str, request: Request) -> SlurmRefused:
    return SlurmRefused(explain_refusal(stderr, request.cluster, {**request.options, "array": request.array}))


@contextmanager
def _locked(request: Request) -> Iterator[None]:
    """Lock these runs against other submissions; if the block fails, remove what it created.

    A submission that waited for the lock then finds the other's live job. A killed process leaves no lock.
    """
    created: list[Path] = []
    with ExitStack() as cleanup:
        try:
            # In a fixed order, so that two submissions cannot deadlock.
            for member in sorted(request.members, key=lambda member: member.run):
                for parent in reversed([path for path in member.run.parents if not path.exists()]):
                    cleanup.callback(_remove_if_empty, parent)
                cleanup.callback(_lock(member.run).release)
                is_new = os.listdir(member.run) == [_LOCK]
                parts = request.folder(member), member.run / "logs"
                created += [member.run] if is_new else filter(None, map(_first_missing, parts))
            yield
        except BaseException:
            for path in created:
                shutil.rmtree(path, ignore_errors=True)
            raise


_LOCK = "submitting"


def _lock(run: Path) -> RunLock:
    while True:
        try:
            run.mkdir(parents=True, exist_ok=True)
            lock = RunLock(run, LEASE_SECONDS, name=_LOCK, activity="submits")
        except FileNotFoundError:
            continue  # another submission was refused and removed the folder
        except OSError as error:
            raise _unwritable(run, error) from None
        if lock.is_effective:
            return lock


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _first_missing(folder: Path) -> Path | None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    return missing[-1] if missing else None


def wait(request: Request, jobs: Sequence[Job], follow: bool) -> int:
    """Wait until all jobs have ended, printing their logs with `follow`; 0 if all were COMPLETED, else 1."""
    runs = [JobFolder(member.run) for member in request.members]
    selection = log_files.LogSelection(shows_run_name=len(runs) > 1)
    readers = [log_files.LogReader(run, selection) for run in runs] if follow else []
    ids = {job.id for job in jobs}
    ends = log_files.follow(readers, {run: [job for job in run.jobs() if job.id in ids] for run in runs})
    # Only the last job of a chain counts.
    decisive = {job.id for job in (jobs if request.chain == 1 else jobs[-1:])}
    is_done = all(state.state == "COMPLETED" for state in ends if state.job in decisive)
    return ExitStatus.DONE if is_done else ExitStatus.FAILED
