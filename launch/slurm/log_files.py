"""The log files of a run's processes, and new lines in them."""

import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .job_folder import Job, JobFolder
from .states import JobState, wait_until_ended

BATCH = "batch"
"""Stands for the log of the batch script where a rank is expected."""


@dataclass(frozen=True)
class Choice:
    """Which logs, and which of their lines."""

    rank: str = "0"
    """A number, `all`, or `batch`."""

    restart: int | None = None
    """Of the newest job; its newest start where None."""

    stderr: bool = False
    """Standard error instead of standard output."""

    pattern: re.Pattern[str] | None = None
    """Lines in which it is found."""

    is_named: bool = False
    """The run's name before each line."""


def log_files(run: JobFolder, choice: Choice) -> list[Path]:
    """The files that are there, in the order of ranks."""
    logs = run.path / "logs"
    jobs = [job.id for job in run.jobs() if (logs / job.id).is_dir()]
    if choice.rank == BATCH:
        named = [logs / f"{job.id}.log" for job in run.jobs()]
        return [file for file in named if file.is_file()][-1:]
    folder = logs  # of a run that was started without a job
    if jobs:
        starts = sorted((int(path.name), path) for path in (logs / jobs[-1]).iterdir() if path.name.isdigit())
        found = [path for number, path in starts if choice.restart in (None, number)]
        if not found:
            return []
        folder = found[-1]
    suffix = "err" if choice.stderr else "log"
    name = "rank_*" if choice.rank == "all" else f"rank_{choice.rank}"
    return sorted(folder.glob(f"{name}.{suffix}"), key=_rank)


def _rank(file: Path) -> int:
    return int(file.stem.removeprefix("rank_"))


class LogReader:
    """Prints the lines of the chosen logs as they come, also of starts that begin later."""

    def __init__(self, run: JobFolder, choice: Choice):
        self.run = run
        self._choice = choice
        self._places: dict[Path, int] = {}

    def show_last(self, lines: int) -> bool:
        """Print the last lines of each file; whether there is any file. What follows is new."""
        files = log_files(self.run, self._choice)
        for file in files:
            for line in deque(self._new_lines(file), maxlen=lines):
                self._print(file, line)
        return bool(files)

    def show_new(self) -> None:
        """Print what was written since, by a start that has ended meanwhile too."""
        for file in dict.fromkeys([*self._places, *log_files(self.run, self._choice)]):
            for line in self._new_lines(file):
                self._print(file, line)
        sys.stdout.flush()

    def _new_lines(self, file: Path) -> Iterator[str]:
        with file.open("rb") as log:
            log.seek(self._places.get(file, 0))
            new = log.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._places[file] = self._places.get(file, 0) + len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if self._choice.pattern is None or self._choice.pattern.search(line):
                yield line

    def _print(self, file: Path, line: str) -> None:
        rank = f"[{_rank(file)}] " if self._choice.rank == "all" else ""
        name = f"{self.run.name}: " if self._choice.is_named else ""
        print(f"{name}{rank}{line}")


def follow(readers: Sequence[LogReader], jobs: Mapping[JobFolder, Sequence[Job]]) -> list[JobState]:
    """Print what is written until none of these jobs waits or runs; their states then."""

    def show() -> None:
        for reader in readers:
            reader.show_new()

    return wait_until_ended(jobs, show)
