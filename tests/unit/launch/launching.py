"""A launcher in a process of its own, and the script that its ranks run."""

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]

SOCKET_MAXIMUM = """
import socket

line = socket.create_connection(("127.0.0.1", int(os.environ["MAXIMUM_PORT"])))
def largest(number):
    line.sendall(bytes([number]))
    return line.recv(1)[0]
def leave():
    line.close()
"""
"""All-reduce (maximum) through a `MaximumServer`: no torch, whose import takes seconds."""

GLOO_MAXIMUM = """
from datetime import timedelta

import torch
from torch import distributed

from megakernel.parallel.rendezvous import connect_store

store = connect_store(place, timedelta(seconds=60))
distributed.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size)
def largest(number):
    numbers = torch.tensor([number])
    distributed.all_reduce(numbers, op=distributed.ReduceOp.MAX)
    return int(numbers)
leave = distributed.destroy_process_group
"""
"""All-reduce (maximum) as in training: with Gloo."""

RANK_SCRIPT = """
received = []
ends = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
for number in ends:
    signal.signal(number, lambda number, frame: received.append(number))
held = open(f"{folder}/rank_{place.rank}.lock", "w")
fcntl.flock(held, fcntl.LOCK_EX)
largest(0)
print(f"rank {place.rank} of {place.world_size} with {os.environ['OMP_NUM_THREADS']} threads", flush=True)

if how == "listen":
    import psutil
    sockets = psutil.Process().net_connections("tcp")
    print(sorted({socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}), flush=True)
if how == "raise" and place.rank == 1:
    raise RuntimeError("boom in rank 1")
if how == "in use":
    print("megakernel: error: process 7 writes there", file=sys.stderr, flush=True)
    os._exit(90)
if how == "killed" and place.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if how == "start":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        largest(0)
        print("a step", flush=True)
        while True:
            signal.pause()
    except KeyboardInterrupt:
        print("megakernel: error: interrupted", file=sys.stderr, flush=True)
        os._exit(1)
if how == "hang" and place.rank == 0:
    os._exit(0)
if how == "hang" and place.rank == 1:
    while True:
        signal.pause()
asked = 0
while how == "step":
    # The same on all ranks: the signal may not have reached this one yet.
    asked = largest(max(received, default=0))
    if asked:
        break
    print("a step", flush=True)
largest(0)
leave()
signal.pthread_sigmask(signal.SIG_BLOCK, ends)
sys.exit({0: 0, signal.SIGTERM: 143, signal.SIGHUP: 143}.get(asked, 85))
"""

RANK_HEADER = """
import fcntl, os, signal, sys

from launch.environment import launched_process

how, folder = sys.argv[1:]
place = launched_process()
"""

LAUNCHER_SCRIPT = """
import sys
from pathlib import Path
from launch.local import run_ranks

folder, how, nproc, leave = sys.argv[1:]
command = [sys.executable, f"{folder}/rank.py", how, folder]
sys.exit(run_ranks(command, int(nproc), Path(folder, "logs"), grace_seconds=0.5, straggler_seconds=float(leave)))
"""

INSTALLED_SCRIPT = """
import sys
sys.path.remove("")  # which the installed command does not have
from launch.cli import main
sys.exit(main())
"""
"""The command as it is installed: without the working folder on Python's path."""


class MaximumServer:
    """Answers `size` ranks with the largest of their numbers, again and again until one of them leaves."""

    def __init__(self, size: int):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.size = size
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        # Connections stay open: the others wait for a rank that left, as they would in training.
        self.lines = [self.listener.accept()[0] for _ in range(self.size)]
        with contextlib.suppress(ConnectionError):
            while all(numbers := [line.recv(1) for line in self.lines]):
                for line in self.lines:
                    line.sendall(max(numbers))


class Launch:
    """A running launcher; `folder` holds its logs."""

    def __init__(
        self,
        folder: Path,
        how: str,
        nproc: int = 2,
        straggler_seconds: float = 60.0,
        maximum: str = SOCKET_MAXIMUM,
        **env: str,
    ):
        self.folder = folder
        (folder / "rank.py").write_text(RANK_HEADER + maximum + RANK_SCRIPT)
        self.maximum_server = MaximumServer(nproc)
        arguments = [folder, how, nproc, straggler_seconds]
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER_SCRIPT, *map(str, arguments)],
            cwd=REPOSITORY,
            env={**os.environ, "MAXIMUM_PORT": str(self.maximum_server.port), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_a_step(self) -> None:
        """Wait until every rank has signal handlers and is in its loop."""
        assert self.process.stdout is not None
        assert any(line == "a step\n" for line in self.process.stdout)

    def wait_for_death(self, rank: int) -> None:
        """Wait until a rank has exited: it holds this lock while it lives."""
        with (self.folder / f"rank_{rank}.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)

    def finish(self) -> tuple[int, str, str]:
        """Exit status, stdout and stderr."""
        out, err = self.process.communicate(timeout=240)
        return self.process.returncode, out, err

    def log(self, rank: int) -> str:
        """The log of a rank over all launches into this folder."""
        return (self.folder / f"logs/rank_{rank}.log").read_text()
