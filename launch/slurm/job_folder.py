"""The submitted jobs of a run, in its folder: ids, submissions and events."""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from launch.arguments import NotFound, candidate_folders
from launch.run_progress import UNREADABLE, saved_step, why_unreadable
from megakernel.checkpoint.trained_run import block_folders, stage_folders
from megakernel.config import UserError
from megakernel.config.cluster import Cluster
from megakernel.config.errors import nearest_first
from megakernel.training import events
from megakernel.training.environment import recorded_variables
from megakernel.training.run_folder import write_atomically

FILE = "run.json"
SETTINGS = "settings.json"
SECRETS = "environment"
"""File next to the settings with the job's possibly secret variables, as shell lines that only its owner can read."""


@dataclass(frozen=True)
class Job:
    """One submitted job."""

    id: str
    """Slurm's job id (ARRAY_INDEX for a member of an array), or the process id of a local job."""

    executor: str
    """slurm, local or debug."""

    submission: str
    """Name of the submission's folder in submissions/."""

    submitted: str
    """Time of submission, UTC, ISO 8601."""


@dataclass(frozen=True)
class Settings:
    """The settings of a submission; enough to submit again."""

    command: list[str]
    """Arguments of `megakernel`; `$submission` in them is the submission's folder."""

    cluster: dict[str, Any]
    """The cluster's settings: defaults with the command line's options over them."""

    name: str
    """Name of the job."""

    chain: int = 1
    """Number of jobs of the submission that continue the run one after another."""

    @property
    def resources(self) -> Cluster:
        """`cluster` as a validated object."""
        return Cluster(**self.cluster)

    @property
    def trains(self) -> bool:
        """Whether the job trains a run, so that it can be continued."""
        return self.command[0] in ("pretrain", "uptrain")


class JobFolder:
    """A run's folder; files are read when methods are called."""

    def __init__(self, path: Path):
        self.path = path
        self._file = path / FILE

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.path.name

    @property
    def exists(self) -> bool:
        """Whether a job was ever submitted here."""
        return self._file.exists()

    def jobs(self) -> list[Job]:
        """Every job, oldest first. Raises UserError if run.json cannot be read."""
        if not self.exists:
            return []
        with _unreadable_is_an_error(self._file):
            jobs = [Job(**job) for job in json.loads(self._file.read_text())["jobs"]]
            if not jobs:
                raise ValueError("it lists no job")
            return jobs

    def jobs_if_readable(self) -> list[Job]:
        """Every job, or none if run.json cannot be read: one damaged run should not hide the others."""
        with suppress(UserError):
            return self.jobs()
        return []

    def add(self, jobs: list[Job]) -> None:
        """Record new jobs."""
        record = {"run": self.name, "jobs": [asdict(job) for job in (*self.jobs(), *jobs)]}
        write_atomically(self._file, json.dumps(record, indent=1) + "\n")

    def submission(self, name: str) -> Path:
        """Folder of a submission."""
        return self.path / "submissions" / name

    def logs(self, job: str, restart: int) -> Path:
        """Folder of the logs of one start of a job."""
        return self.path / "logs" / job / str(restart)

    def settings(self, job: Job) -> Settings:
        """The settings of a job."""
        return read_settings(self.submission(job.submission))

    def stages(self) -> list[Path]:
        """The folders of an up-training's stages that have begun, in order; empty for other runs.

        A stage that trains in blocks of layers comes after its blocks once it has a checkpoint, otherwise before them.
        """
        stages: list[Path] = []
        for stage in stage_folders(self.path, "config.yaml"):
            blocks = block_folders(stage)
            stages += [*blocks, stage] if saved_step(stage) else [stage, *blocks]
        return stages

    @property
    def training(self) -> Path:
        """The folder with the newest steps: that of the last stage, else the run's own."""
        return [self.path, *self.stages()][-1]

    def events(self, job: str | None = None) -> list[dict[str, Any]]:
        """Events of the run and its stages by time, of one job or all."""
        every = (event for path in (self.path, *self.stages()) for event in events.read(path))
        of_job = (event for event in every if job is None or event.get("job") == job)
        return sorted(of_job, key=lambda event: event["time"])

    def saved_steps(self) -> int:
        """Saved optimizer steps, summed over the newest checkpoints of the run and its stages."""
        return sum(saved_step(path) for path in (self.path, *self.stages()))


def write_settings(folder: Path, settings: Settings) -> None:
    """Write the settings of a submission and, apart, its possibly secret variables."""
    variables = settings.cluster["environment"]
    known = recorded_variables(variables)
    record = asdict(settings) | {"cluster": settings.cluster | {"environment": known}}
    (folder / SETTINGS).write_text(json.dumps(record, indent=1) + "\n")
    (folder / SECRETS).touch(mode=0o600)
    lines = (f"{name}={shlex.quote(value)}\n" for name, value in variables.items() if name not in known)
    (folder / SECRETS).write_text("".join(lines))


def read_settings(folder: Path) -> Settings:
    """The settings of the submission in `folder`. Raises UserError if they cannot be read."""
    with _unreadable_is_an_error(folder / SETTINGS):
        record = json.loads((folder / SETTINGS).read_text())
        settings = Settings(**record)
        if "chain" not in record and settings.cluster.get("requeue"):
            settings.cluster["requeue"] = None  # what the default of earlier versions, true, meant
        if (folder / SECRETS).exists():  # submissions of earlier versions have none
            pairs = (word.partition("=") for word in shlex.split((folder / SECRETS).read_text()))
            settings.cluster["environment"] |= {name: value for name, _, value in pairs}
    return settings


@contextmanager
def _unreadable_is_an_error(file: Path) -> Iterator[None]:
    """Turn any failure to read a file into a UserError."""
    try:
        yield
    except UNREADABLE as error:
        raise UserError(f"{why_unreadable(str(file), error)}; restore or remove it") from None


def all_runs(root: Path) -> list[JobFolder]:
    """The submitted runs under `root`, by name in natural order: sw-2 before sw-10."""

    def order(run: JobFolder) -> list[Any]:
        return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", run.name)]

    return sorted((JobFolder(file.parent) for file in root.glob(f"*/{FILE}")), key=order)


def find_runs(texts: Sequence[str], root: Path) -> list[JobFolder]:
    """The runs that match folders, names under `root`, job ids, or patterns of these, each run once.

    The name or job id of an array or a sweep matches all its members. Raises NotFound for a text without a match.
    """
    runs: dict[Path, JobFolder] = {}
    for text in texts:
        named = [JobFolder(path) for path in candidate_folders(text, root) if (path / FILE).exists()]
        matches = named[:1] or [run for run in all_runs(root) if _matches(text, run)]
        if not matches:
            if any((path / "config.yaml").is_file() for path in candidate_folders(text, root)):
                raise NotFound(f"{text} was started without a job; megakernel monitor --once {text} shows it")
            known = nearest_first(text, (run.name for run in all_runs(root)), most=5) or f"none yet in {root}"
            raise NotFound(f"{text} is no submitted run, and no job of one; submitted runs: {known}")
        runs |= {run.path: run for run in matches}
    return list(runs.values())


def _matches(text: str, run: JobFolder) -> bool:
    names = run.name, str(run.path)
    if any(fnmatchcase(name, text) for name in names):
        return True
    ids = [job.id for job in run.jobs_if_readable()]
    if re.fullmatch(r"\d+(_[\d*?]+)?", text):
        return any(fnmatchcase(id, text) or id.partition("_")[0] == text for id in ids)
    is_member = any("_" in id for id in ids)
    return is_member and any(re.fullmatch(rf"{re.escape(text)}-\d+", name) for name in names)
