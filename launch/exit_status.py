"""Exit statuses of all commands; batch scripts and other tools rely on them."""

from enum import IntEnum


class ExitStatus(IntEnum):
    """How a command ended."""

    DONE = 0
    """The command succeeded."""

    FAILED = 1
    """Something failed."""

    USAGE = 2
    """The command line or the configuration must be changed."""

    NOT_FOUND = 3
    """There is no such run or job."""

    REFUSED = 4
    """Slurm refused, or cannot be reached."""

    STOPPED = 85
    """Stopped by a signal after saving; the same command continues, and a batch script may requeue the job."""

    STALLED = 86
    """A step made no progress for too long; a batch script may restart the run from its last checkpoint."""

    UNFIT = 87
    """A node is unfit for the run; a batch script may restart the run without that node."""

    OUT_OF_MEMORY = 88
    """A process of the job ran out of memory; a batch script may restart the run."""

    NOT_FINITE = 89
    """Too many steps in a row had a non-finite loss or gradient; the configuration must be changed."""

    IN_USE = 90
    """Another process writes into the run's folder; a batch script may restart the run after that one ends."""

    NOT_PREPARED = 92
    """The data could not be verified or indexed before the first step; what is finished is kept. (91 is the batch
    script's own.)"""

    BROKEN_PIPE = 141
    """The reader of the output closed it, as `head` does: 128 + SIGPIPE, as for any program."""

    TERMINATED = 143
    """Ended by SIGTERM after saving; the same command continues, but no batch script restarts it."""
