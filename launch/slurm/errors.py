"""What ends a command about jobs, beside usage errors; the exit status tells them apart."""

from megakernel.config import UserError


class NotFound(UserError):
    """There is no such run, job or log."""


class SlurmRefused(UserError):
    """Slurm does not take the job, or does not answer."""
