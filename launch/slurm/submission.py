"""From what is to be run to a job, or to nothing at all: a refused submission leaves no file behind."""

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from megakernel.config import UserError
from megakernel.config.cluster import Cluster
from megakernel.training import events

from .errors import SlurmRefused
from .executor import Refused, ScriptExecutor
from .job_folder import Job, JobFolder, Settings, write_settings
from .live import live_jobs
from .programs import call
from .refusals import explained
from .script import Script
from .snapshot import write_snapshot

if TYPE_CHECKING:
    import submitit

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
class Request:
    """All that is to be submitted at once."""

    template: str
    """`pretrain`, `uptrain`, `prepare`, `evaluate` or `command`: a file of slurm/."""

    command: Sequence[str]
    """Arguments of `megakernel`; `$submission` stands for the submission's folder."""

    cluster: Cluster
    """What is asked of the cluster."""

    base: Path
    """Folder of the run; of an array's members before `-INDEX`."""

    members: Sequence[Member]
    """The runs."""

    array: str | None = None
    """Indices of the members as Slurm writes them, `%K` behind them for at most K at a time."""

    options: Mapping[str, str] = field(default_factory=dict)
    """More options of sbatch, such as dependency."""

    chain: int = 1
    """Jobs one after the other that all go on with the run."""

    name: str = field(default_factory=lambda: Request.new_name())
    """Of the submission's folder."""

    @staticmethod
    def new_name() -> str:
        """One that tells when."""
        return time.strftime("%Y%m%d-%H%M%S", time.gmtime())

    def folder(self, member: Member) -> Path:
        """The submission's folder in a member's run."""
        return JobFolder(member.run).submission(self.name)

    def script(self, after: str | None = None) -> str:
        """The batch script; `after`: the job that it waits for."""
        options = dict(self.options)
        if after is not None:
            options["dependency"] = f"afterany:{after}"
        base = self.base.absolute()
        return Script(
            self.template,
            self.cluster,
            base,
            self.name,
            self.command,
            name=base.name,
            array=self.array,
            options=options,
        ).text()


def test(request: Request) -> str:
    """What Slurm says to `sbatch --test-only`; nothing is submitted. Raises SlurmRefused."""
    done = call(["sbatch", "--test-only"], input_text=request.script())
    if done.returncode:
        raise _refused(done.stderr, request)
    return done.stderr.strip().removeprefix("sbatch: ")


def submit(request: Request) -> list[Job]:
    """Submit, and write everything down; the jobs in the order of chain and members.

    Raises UserError where a member has a live job, SlurmRefused where Slurm does not take the job; nothing is left
    behind then, and jobs of a chain that were taken are cancelled again.
    """
    for member in request.members:
        _refuse_live(JobFolder(member.run))
    with _nothing_left_behind(request):
        _write(request)
        if request.cluster.executor == "slurm":
            return _submit_to_slurm(request)
        started = _start_here(request)
        jobs = _written_down(started.job_id, request)
    if request.cluster.executor == "debug":
        started.result()  # it runs now, and what it makes stays
    return jobs


def _write(request: Request) -> None:
    settings = Settings(list(request.command), request.cluster.model_dump(mode="json"), request.base.name)
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
                shutil.copytree(code, folder / "code", copy_function=os.link)
            _close(folder)
        except FileExistsError:
            raise UserError(
                f"{member.run} was submitted less than a second ago; see megakernel status {member.run}"
            ) from None
        except OSError as error:
            remedy = "make it writable or choose another run.root"
            raise UserError(f"{member.run} cannot hold the run ({error}); {remedy}") from None


def _close(folder: Path) -> None:
    """Nobody but its owner reads what lies in the folder."""
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)


def _submit_to_slurm(request: Request) -> list[Job]:
    first = request.folder(request.members[0])
    ids: list[str] = []
    try:
        for _ in range(request.chain):
            text = request.script(after=ids[-1] if ids else None)
            submitted = ScriptExecutor(first, text).submit_script()
            ids.append(submitted.job_id)
            _keep_script(request, submitted.paths.submission_file, text)
        return [job for id in ids for job in _written_down(id, request)]
    except BaseException as error:
        if ids:
            call(["scancel", *ids])
        if isinstance(error, Refused):
            raise _refused(str(error), request) from None
        raise


def _keep_script(request: Request, file: Path, text: str) -> None:
    """submitit names the script after the job, and leaves a link where it was: one name for readers is enough."""
    for link in file.parent.glob(".submission_file_*"):
        link.unlink()
    file.unlink()
    for member in request.members:
        (request.folder(member) / "submit.sbatch").write_text(text)
        _close(request.folder(member))


def _written_down(job: str, request: Request) -> list[Job]:
    jobs = []
    for member in request.members:
        name = job if member.index is None else f"{job}_{member.index}"
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        jobs.append(Job(name, request.cluster.executor, request.name, now))
        JobFolder(member.run).add(jobs[-1:])
        events.record(member.run, "submitted", env={events.JOB_VARIABLE: name}, submission=request.name)
    return jobs


def _start_here(request: Request) -> "submitit.Job[int]":
    """submitit's job on this machine; that of its debug executor runs when it is asked for its result."""
    import submitit

    from .here import HereJob

    folder = request.folder(request.members[0]).absolute()
    if request.cluster.executor == "debug":
        return submitit.DebugExecutor(folder).submit(HereJob(folder))
    executor = submitit.LocalExecutor(folder)
    executor.update_parameters(
        gpus_per_node=request.cluster.gpus_per_node,
        signal_delay_s=request.cluster.signal_delay,
        timeout_min=request.cluster.minutes or _FOR_EVER,
    )
    return executor.submit(HereJob(folder))


_FOR_EVER = 60.0 * 24 * 365
"""Minutes; submitit's own limit is two."""


def _refuse_live(run: JobFolder) -> None:
    live = live_jobs(run)
    if live:
        named = ", ".join(f"{job} {state}" for job, state in live.items())
        remedy = f"wait for it, megakernel cancel {run.path}, or choose another run.name"
        raise UserError(f"{run.path} has a live job ({named}); {remedy}")


def _refused(stderr: str, request: Request) -> SlurmRefused:
    return SlurmRefused(explained(stderr, request.cluster, {**request.options, "array": request.array}))


@contextmanager
def _nothing_left_behind(request: Request) -> Iterator[None]:
    """Where the block fails, remove what it has made, up to the first folder that was there before."""
    made = [_first_missing(request.folder(member)) for member in request.members]
    logs = [member.run / "logs" for member in request.members if not (member.run / "logs").exists()]
    try:
        yield
    except BaseException:
        for path in (*made, *logs):
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)
        raise


def _first_missing(folder: Path) -> Path | None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    return missing[-1] if missing else None
