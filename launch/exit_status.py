"""What the exit status of every command means; batch scripts and other tools rely on it."""

from enum import IntEnum


class ExitStatus(IntEnum):
    """How a command ended."""

    DONE = 0
    """What was asked is done."""

    FAILED = 1
    """Something broke."""

    USAGE = 2
    """The command line or the configuration has to change."""

    NOT_FOUND = 3
    """There is no such run or job."""

    REFUSED = 4
    """Slurm refused, or cannot be reached."""

    STOPPED = 85
    """Stopped by a signal after saving; the same command goes on, and a batch script may requeue it."""

    STALLED = 86
    """A step made no progress for too long; a batch script may start the run again from its last save."""

    UNFIT = 87
    """A node is not fit for the run; a batch script may start it again without that node."""

    OUT_OF_MEMORY = 88
    """A process of the job asked for more memory than there is; a batch script may start the run again."""

    NOT_FINITE = 89
    """The loss or its gradients were not finite in too many steps in a row; the configuration has to change."""

    IN_USE = 90
    """Another process writes into the run's folder; a batch script may start the run again once that one has ended."""

    NOBODY_READS = 141
    """Whoever read the output has closed it, as `head` does: 128 and the number of PIPE, as of any program."""

    TERMINATED = 143
    """Ended by TERM after saving; the same command goes on, but nothing starts it by itself."""
