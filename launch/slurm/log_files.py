"""Finds and follows the log files of a run's processes."""

import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .job_folder import Job, JobFolder
from .states import JobState, wait_until_ended

BATCH = "batch"
"""Selects the log of the batch script in place of a rank's."""


@dataclass(frozen=True)
class LogSelection:
    """Which logs to show, and which of their lines."""

    rank: str = "0"
    """A number, `all`, or `batch`."""

    restart: int | None = None
    """Start of the newest job; None for the newest start."""

    stderr: bool = False
    """Standard error instead of standard output."""

    pattern: re.Pattern[str] | None = None
    """Show only lines that it matches."""

    shows_run_name: bool = False
    """Print the run's name before each line."""


def log_files(run: JobFolder, selection: LogSelection) -> list[Path]:
    """The existing log files, by rank."""
    logs = run.path / "logs"
    jobs = [job.id for job in run.jobs() if (logs / job.id).is_dir()]
    if selection.rank == BATCH:
        named = [logs / f"{job.id}.log" for job in run.jobs()]
        return [file for file in named if file.is_file()][-1:]
    folder = logs  # for a run without a job
    if jobs:
        starts = sorted((int(path.name), path) for path in (logs / jobs[-1]).iterdir() if path.name.isdigit())
        selected = [path for number, path in starts if selection.restart in (None, number)]
        if not selected:
            return []
        folder = selected[-1]
    suffix = "err" if selection.stderr else "log"
    name = "rank_*" if selection.rank == "all" else f"rank_{selection.rank}"
    return sorted(folder.glob(f"{name}.{suffix}"), key=lambda file: (len(file.name), file.name))


class LogReader:
    """Prints new lines of the chosen logs, including those of later starts."""

    def __init__(self, run: JobFolder, selection: LogSelection):
        self.run = run
        self._selection = selection
        self._offsets: dict[Path, int] = {}

    def show_last(self, lines: int, to_end: bool) -> bool:
        """Print the last lines of each file, from which `show_new` continues; return whether there is any file.

        to_end: also a last line that has no newline yet.
        """
        files = log_files(self.run, self._selection)
        for file in files:
            for line in deque(self._new_lines(file, to_end), maxlen=lines):
                self._print(file, line)
        return bool(files)

    def show_new(self, to_end: bool = False) -> None:
        """Print the lines written since, including those of a start that has ended meanwhile."""
        for file in dict.fromkeys([*self._offsets, *log_files(self.run, self._selection)]):
            for line in self._new_lines(file, to_end):
                self._print(file, line)
        sys.stdout.flush()

    def _new_lines(self, file: Path, to_end: bool) -> Iterator[str]:
        with file.open("rb") as log:
            log.seek(self._offsets.get(file, 0))
            new = log.read()
        whole = new if to_end else new[: new.rfind(b"\n") + 1]
        self._offsets[file] = self._offsets.get(file, 0) + len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if self._selection.pattern is None or self._selection.pattern.search(line):
                yield line

    def _print(self, file: Path, line: str) -> None:
        rank = f"[{file.stem.removeprefix('rank_')}] " if self._selection.rank == "all" else ""
        name = f"{self.run.name}: " if self._selection.shows_run_name else ""
        print(f"{name}{rank}{line}")


def follow(readers: Sequence[LogReader], jobs: Mapping[JobFolder, Sequence[Job]]) -> list[JobState]:
    """Print new lines until none of the jobs is live; return their final states."""

    def show(to_end: bool = False) -> None:
        for reader in readers:
            reader.show_new(to_end)

    states = wait_until_ended(jobs, show)
    show(to_end=True)
    return states
