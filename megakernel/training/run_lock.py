"""One start at a time writes into a run folder."""

import errno
import fcntl
import os
import socket
import time
from pathlib import Path

from megakernel.config import InUse

WAIT_SECONDS = 10.0
"""How long a start waits for another one in its folder: one that was told to end may still be ending."""

LEASE_SECONDS = 120.0
"""The same where that is on another host: file servers keep the locks of a host that is gone for a while."""

_TAKEN = (errno.EACCES, errno.EAGAIN)
_POLL_SECONDS = 0.1


class RunLock:
    """Held by this process while this object lives, and no longer than the process does, however it ends.

    The lock is POSIX's: processes that this one forks do not hold it, network file systems pass it on, and a process
    should have one object of a folder, for the first that goes releases it. Where a file system has no locks there is
    none.
    """

    def __init__(
        self,
        folder: Path,
        wait_seconds: float = WAIT_SECONDS,
        lease_seconds: float = LEASE_SECONDS,
        *,
        name: str = "lock",
        held_to: str = "writes into",
    ):
        """folder: of the run; its file `name` says who holds the lock. held_to: what whoever holds it does there.

        Raises InUse where another process does for longer than `wait_seconds`, or `lease_seconds` on another host.
        """
        self._path = folder / name
        self._file = self._path.open("a+", encoding="utf-8")
        begun = time.monotonic()
        while not self._taken():
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            here = holder.endswith(f" on {socket.gethostname()}")
            if time.monotonic() - begun > (wait_seconds if here else lease_seconds):
                self._file.close()
                raise InUse(
                    f"run.name={folder.name}: {holder} {held_to} {folder}; wait until it ends, stop it, or choose "
                    "another run.name"
                )
            time.sleep(_POLL_SECONDS)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    @property
    def is_of_its_file(self) -> bool:
        """Whether others would meet this lock: not where the one who held it before has removed the file."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except OSError:
            return False

    def release(self) -> None:
        """Leave the folder to others, without a trace."""
        self._path.unlink(missing_ok=True)
        self._file.close()

    def _taken(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in _TAKEN
        return True
