"""From what is to be run to a job, or to nothing at all: a refused submission leaves no file behind."""

import io
import os
import shutil
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
from launch.slurm_programs import SlurmRefused, call, foreign_variables, require
from megakernel.config import UserError
from megakernel.training import events
from megakernel.training.environment import REVISION, git, revision
from megakernel.training.run_folder import LEASE_SECONDS, RunLock

from . import log_files
from .attempt import run_here
from .job_folder import Job, JobFolder, Settings, write_settings
from .refusals import explained
from .script import REPOSITORY, Script
from .states import refuse_live

CONFIG = "config.yaml"


@dataclass(frozen=True)
class Member:
    """One run of a submission, which has one, or one for each index of an array."""

    run: Path

    config: str | None = None
    """The resolved configuration, where the command reads one."""

    index: int | None = None
    """In the array."""


@dataclass(frozen=True)
class Request(Script):
    """All that is to be submitted at once; its script is that of every job."""

    members: Sequence[Member] = ()
    """The runs."""

    chain: int = 1
    """Jobs one after the other that all go on with the run."""

    def folder(self, member: Member) -> Path:
        """The submission's folder in a member's run."""
        return JobFolder(member.run).submission(self.submission)

    def after(self, job: str) -> "Request":
        """The same, to begin when another job has ended."""
        return replace(self, options={**self.options, "dependency": f"afterany:{job}"})


def new_name() -> str:
    """Of a submission, which tells when."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime())


def test(request: Request) -> str:
    """What Slurm says to `sbatch --test-only`; nothing is submitted. Raises SlurmRefused."""
    done = call(["sbatch", "--test-only"], input_text=request.text())
    if done.returncode:
        raise _refused(done.stderr, request)
    return done.stderr.strip().removeprefix("sbatch: ")


def submit(request: Request) -> list[Job]:
    """Submit, and write everything down; the jobs in the order of chain and members.

    Raises UserError where a member has a live job, SlurmRefused where Slurm does not take the job; nothing is left
    behind then, and jobs of a chain that were taken are cancelled again.
    """
    with _alone(request):
        for member in request.members:
            _refuse_trained(member)
        refuse_live([JobFolder(member.run) for member in request.members])
        _write(request)
        if request.cluster.executor == "slurm":
            return _submit_to_slurm(request)
        started = _start_here(request)
        jobs = _written_down(started.job_id, request)
    if request.cluster.executor == "debug":
        started.result()  # it runs now, and what it makes stays
    return jobs


def _write(request: Request) -> None:
    settings = Settings(list(request.command), request.cluster.model_dump(mode="json"), request.run.name)
    code: Path | None = None
    for member in request.members:
        folder = request.folder(member)
        try:
            folder.mkdir(mode=0o700, parents=True)  # what was typed and changed is its owner's affair
            (member.run / "logs").mkdir(exist_ok=True)
            write_settings(folder, settings)
            if member.config is not None:
                (folder / CONFIG).write_text(member.config, encoding="utf-8")
            if code is None:
                code = write_snapshot(folder / "code")
            else:
                (folder / "code").symlink_to(code.absolute())
            _close(folder)
        except FileExistsError:
            raise UserError(
                f"{member.run} was submitted less than a second ago; see megakernel status {member.run}"
            ) from None
        except OSError as error:
            raise _unwritable(member.run, error) from None


def _unwritable(run: Path, error: OSError) -> UserError:
    return UserError(f"{run} cannot hold the run ({error}); make it writable or choose another run.root")


def _close(folder: Path) -> None:
    """Nobody but its owner reads what lies in the folder."""
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)


_CODE = ("megakernel/*", "launch/*", "data_pipeline/*", "benchmarks/*.py", "slurm/*")
"""What of a checkout's files is taken along; anything else may be data."""

_NEW_CODE = tuple(f"{name}/*.py" for name in ("megakernel", "launch", "data_pipeline", "benchmarks"))
"""The same of files that git does not know, which may be somebody's secrets."""


def write_snapshot(folder: Path, repository: Path = REPOSITORY) -> Path:
    """Write the code as it is now, for the job to run, and revision.txt; that alone where there is no checkout.

    Gives the folder.
    """
    folder.mkdir()
    (folder / REVISION).write_text(revision(repository / "launch" / "cli.py") + "\n")
    tracked = git(repository, "ls-files", "-z", "--", *_CODE) or ""
    new = git(repository, "ls-files", "--others", "--exclude-standard", "-z", "--", *_NEW_CODE) or ""
    for name in {*tracked.split("\0"), *new.split("\0")}:
        if (source := repository / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
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
            _close(request.folder(member))
        return [job for id in ids for job in _written_down(id, request)]
    except BaseException as error:
        if ids:
            call(["scancel", *ids])
        if isinstance(error, _Refused):
            raise _refused(str(error), request) from None
        raise


class _Refused(SlurmRefused):
    """sbatch failed; its text is what sbatch wrote on stderr."""


class ScriptExecutor(SlurmExecutor):
    """submitit's executor for one batch script: it writes the script, hands it to sbatch and reads the job's id.

    Its own script would be one srun of a pickled function, and that cannot carry these jobs. Nodes are looked at
    before that srun and the processes are told where to meet; behind it somebody decides whether the job goes back
    into the queue, by how all processes ended, where submitit's handler requeues as soon as one process gets a signal.
    Members of an array have a folder each, and containers, secrets and a command line that Slurm's tools show have no
    place in a pickle. Its `Job` finds states in accounting, which not every cluster has, and results in pickles, which
    are not there: `states` asks in its place.

    folder: where submitit keeps what it writes. script: the whole text of the batch script.
    """

    def __init__(self, folder: Path, script: str):
        require("sbatch")
        super().__init__(folder)
        self._script = script

    def submit_script(self) -> SlurmJob[None]:
        """The submitted job, which knows its id and its files. Raises SlurmRefused with what sbatch says."""
        said = io.StringIO()
        try:
            with redirect_stderr(said):  # submitit prints there before it raises
                return self._submit_command("")
        except (FailedJobError, FailedSubmissionError) as error:
            raise _Refused(str(error) or said.getvalue()) from None

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        scrubbed = [option for name in foreign_variables() for option in ("-u", name)]
        return ["env", *scrubbed, "sbatch", str(submission_file_path)]


def _written_down(job: str, request: Request) -> list[Job]:
    jobs = []
    for member in request.members:
        name = job if member.index is None else f"{job}_{member.index}"
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        jobs.append(Job(name, request.cluster.executor, request.submission, now))
        JobFolder(member.run).add(jobs[-1:])
        events.record(member.run, "submitted", env={events.JOB_VARIABLE: name}, submission=request.submission)
    return jobs


def _start_here(request: Request) -> submitit.Job[int]:
    """submitit's job on this machine; that of its debug executor runs when it is asked for its result."""
    folder = request.folder(request.members[0]).absolute()
    if request.cluster.executor == "debug":
        return submitit.DebugExecutor(folder).submit(run_here, folder)
    executor = submitit.LocalExecutor(folder)
    executor.update_parameters(
        gpus_per_node=request.cluster.gpus_per_node,
        signal_delay_s=request.cluster.signal_delay,
        timeout_min=request.cluster.minutes or _FOR_EVER,
    )
    return executor.submit(run_here, folder)


_FOR_EVER = 60.0 * 24 * 365
"""Minutes; submitit's own limit is two."""


def _refuse_trained(member: Member) -> None:
    """A command that trains nothing leaves alone a folder that a run trains in: as its last job it ends `resume`."""
    trained = (member.run / CONFIG).exists() or any(member.run.glob(f"submissions/*/{CONFIG}"))
    if member.config is None and trained:
        raise UserError(f"{member.run} is a run that trains; choose another --name for the command")


def _refused(stderr: str, request: Request) -> SlurmRefused:
    return SlurmRefused(explained(stderr, request.cluster, {**request.options, "array": request.array}))


@contextmanager
def _alone(request: Request) -> Iterator[None]:
    """Nobody else submits these runs before the block ends; where it fails, what it has made is removed.

    Whoever waited finds the job that was submitted meanwhile. A submitter that is killed leaves no lock.
    """
    made: list[Path] = []
    with ExitStack() as last:
        try:
            for member in sorted(request.members, key=lambda member: member.run):  # in everybody's order
                for parent in reversed([path for path in member.run.parents if not path.exists()]):
                    last.callback(_remove_if_empty, parent)
                last.callback(_lock(member.run).release)
                is_new = os.listdir(member.run) == [_LOCK]
                parts = request.folder(member), member.run / "logs"
                made += [member.run] if is_new else filter(None, map(_first_missing, parts))
            yield
        except BaseException:
            for path in made:
                shutil.rmtree(path, ignore_errors=True)
            raise


_LOCK = "submitting"


def _lock(run: Path) -> RunLock:
    while True:
        try:
            run.mkdir(parents=True, exist_ok=True)
            lock = RunLock(run, LEASE_SECONDS, name=_LOCK, held_to="submits")
        except FileNotFoundError:
            continue  # another submission was refused, and has removed the folder again
        except OSError as error:
            raise _unwritable(run, error) from None
        if lock.is_of_its_file:
            return lock


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _first_missing(folder: Path) -> Path | None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    return missing[-1] if missing else None


def wait(request: Request, jobs: Sequence[Job], follow: bool) -> int:
    """Wait until all have ended, with their logs or without; 0 where all have done what they were to do, else 1."""
    runs = [JobFolder(member.run) for member in request.members]
    readers = [log_files.LogReader(run, log_files.Choice()) for run in runs] if follow else []
    ids = {job.id for job in jobs}
    ends = log_files.follow(readers, {run: [job for job in run.jobs() if job.id in ids] for run in runs})
    # Of a chain the last link tells.
    last = {job.id for job in (jobs if request.chain == 1 else jobs[-1:])}
    is_done = all(state.state == "COMPLETED" for state in ends if state.job in last)
    return ExitStatus.DONE if is_done else ExitStatus.FAILED
