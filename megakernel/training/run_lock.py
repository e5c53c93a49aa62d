"""One start at a time writes into a run folder."""

import errno
import fcntl
import os
import socket
import time
from pathlib import Path

from megakernel.config import UserError

WAIT_SECONDS = 10.0
"""How long a start waits for another one in its folder: one that was told to end may still be ending."""

_TAKEN = (errno.EACCES, errno.EAGAIN)
_POLL_SECONDS = 0.1


class RunLock:
    """Held by this process while this object lives, and no longer than the process does, however it ends.

    The lock is POSIX's: processes that this one forks do not hold it, and network file systems pass it on. Where a file
    system has no locks there is none.
    """

    def __init__(self, folder: Path, wait_seconds: float = WAIT_SECONDS):
        """folder: of the run; its file `lock` says who holds it.

        Raises UserError where another process does for longer than `wait_seconds`.
        """
        self._file = (folder / "lock").open("a+", encoding="utf-8")
        deadline = time.monotonic() + wait_seconds
        while not self._taken():
            if time.monotonic() > deadline:
                self._file.seek(0)
                holder = self._file.read().strip() or "another process"
                self._file.close()
                raise UserError(
                    f"run.name={folder.name}: {holder} writes into {folder}; wait until it ends, stop it, or choose "
                    "another run.name"
                )
            time.sleep(_POLL_SECONDS)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def _taken(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in _TAKEN
        return True
