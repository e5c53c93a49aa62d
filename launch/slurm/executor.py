"""submitit's Slurm executor, with batch scripts and job states of our own."""

import contextlib
import io
from pathlib import Path

from submitit.core import utils
from submitit.slurm.slurm import SlurmExecutor, SlurmInfoWatcher, SlurmJob

from .errors import SlurmRefused
from .programs import foreign_variables, require
from .states import JobState, job_states


class Refused(SlurmRefused):
    """sbatch failed; its text is what sbatch wrote on stderr."""


class QueueWatcher(SlurmInfoWatcher):
    """Asks the queue before accounting: submitit's own asks accounting alone, which not every cluster has."""

    def update(self) -> None:
        """Look all jobs up that have not ended."""
        asked = self._registered - self._finished
        states = job_states(asked)
        self._info_dict |= {job: {"State": states[job].state} for job in asked if job in states}
        self._finished |= {job for job in asked if not states.get(job, JobState(job, "UNKNOWN")).is_live}

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Whether the job has ended; one that nobody knows any more has."""
        self.get_info(job_id, mode=mode)
        return job_id in self._finished


class ScriptJob(SlurmJob):
    """A job whose script says itself how it ended; there are no pickles of results to look for."""

    watcher = QueueWatcher(delay_s=5)

    def done(self, force_check: bool = False) -> bool:
        """Whether it has ended."""
        return self.watcher.is_done(self.job_id, mode="force" if force_check else "standard")


class ScriptExecutor(SlurmExecutor):
    """Submits one batch script.

    folder: where submitit keeps what it writes. script: the whole text of the batch script.
    """

    job_class = ScriptJob

    def __init__(self, folder: Path, script: str):
        require("sbatch")
        super().__init__(folder)
        self._script = script

    def submit_script(self) -> ScriptJob:
        """The submitted job. Raises Refused with what sbatch says."""
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):  # submitit prints there before it raises
                return self._submit_command("")
        except (utils.FailedJobError, utils.FailedSubmissionError) as error:
            raise Refused(str(error) or said.getvalue()) from None

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        scrubbed = [option for name in foreign_variables() for option in ("-u", name)]
        return ["env", *scrubbed, "sbatch", str(submission_file_path)]
