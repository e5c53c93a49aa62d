"""Why a run ends before its last step, and the exit status that tells the launcher."""

from enum import IntEnum


class Stop(IntEnum):
    """A request to save and stop. Where ranks saw different ones the greatest wins: agreeing is a maximum.

    `exit_status` is 85 where the batch script may start the run again (preemption, time limit, Ctrl-C) and
    143 where the run should stay stopped. A stop file and a terminal that was closed count as the latter: whoever
    did that wants the run to end, and a requeued job would not.
    """

    NONE = 0
    SIGUSR1 = 1
    SIGUSR2 = 2
    SIGINT = 3
    STOP_FILE = 4
    SIGHUP = 5
    SIGTERM = 6

    @property
    def exit_status(self) -> int:
        """Exit status of a process that saved and stopped for this reason; 0 for NONE."""
        if self is Stop.NONE:
            return 0
        return 143 if self >= Stop.STOP_FILE else 85
