"""A job without Slurm: submitit's local and debug executors run it on this machine, under the same rules."""

import os
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from submitit import JobEnvironment

from launch import local
from megakernel.training import events

from . import attempt
from .job_folder import JobFolder, read_settings


@dataclass(frozen=True)
class HereJob:
    """What submitit pickles and calls: starts the processes, and again while they are interrupted."""

    submission: Path
    """Folder of the submission, absolute."""

    def __call__(self) -> int:
        """Exit status of the last start."""
        settings = read_settings(self.submission)
        run, cluster = self.submission.parents[1], settings.resources
        command = [word.replace("$submission", str(self.submission)) for word in settings.command]
        os.environ.update(cluster.environment)
        os.environ[events.JOB_VARIABLE] = JobEnvironment().job_id
        for number in count():
            os.environ[events.RESTART_VARIABLE] = str(number)
            attempt.begin(self.submission, "this machine")
            logs = JobFolder(run).logs(os.environ[events.JOB_VARIABLE], number)
            nproc = cluster.tasks_per_node if settings.trains else 1
            status = local.run_ranks([sys.executable, "-m", "launch.cli", *command], nproc, logs)
            if not attempt.end(self.submission, status).restart:
                break
            events.record(run, "requeued")
        return status
