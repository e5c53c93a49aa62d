"""Ranks to launch: a script of real processes that meet over gloo, and a process that launches it."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]

RANK = """
import fcntl, os, signal, sys
from datetime import timedelta

import psutil
import torch
from torch import distributed

from launch.environment import joined
from megakernel.parallel.rendezvous import meet

how = sys.argv[1]
place = joined()
store = meet(place, timedelta(seconds=60))
distributed.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size)
rank = distributed.get_rank()
received = []
asked = torch.zeros(1)
ends = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
for number in ends:
    signal.signal(number, lambda number, frame: received.append(number))
held = open(f"{sys.argv[2]}/rank_{rank}.lock", "w")
fcntl.flock(held, fcntl.LOCK_EX)
total = torch.ones(1)
distributed.all_reduce(total)
print(f"rank {rank} of {total.item():.0f} with {os.environ['OMP_NUM_THREADS']} threads", flush=True)

if how == "listen":
    sockets = psutil.Process().net_connections("tcp")
    print(sorted({socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}), flush=True)
if how == "raise" and rank == 1:
    raise RuntimeError("boom in rank 1")
if how == "in use":
    print("megakernel: error: process 7 writes there", file=sys.stderr, flush=True)
    os._exit(90)
if how == "killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if how == "start":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        distributed.barrier()
        print("a step", flush=True)
        while True:
            signal.pause()
    except KeyboardInterrupt:
        print("megakernel: error: interrupted", file=sys.stderr, flush=True)
        os._exit(1)
if how == "hang" and rank == 0:
    os._exit(0)
if how == "hang" and rank == 1:
    while True:
        signal.pause()
while how == "step":
    # Alike on all ranks: the signal may not have reached this one yet.
    asked = torch.tensor([max(received, default=0)])
    distributed.all_reduce(asked, op=distributed.ReduceOp.MAX)
    if asked.item():
        break
    print("a step", flush=True)
distributed.barrier()
distributed.destroy_process_group()
signal.pthread_sigmask(signal.SIG_BLOCK, ends)
sys.exit({0: 0, signal.SIGTERM: 143, signal.SIGHUP: 143}.get(int(asked), 85))
"""

LAUNCH = """
import sys
from pathlib import Path
from launch.local import run_ranks

folder, how, nproc, leave = sys.argv[1:]
command = [sys.executable, f"{folder}/rank.py", how, folder]
sys.exit(run_ranks(command, int(nproc), Path(folder, "logs"), grace_seconds=0.5, leave_seconds=float(leave)))
"""


class Launch:
    """A launcher under way; `folder` holds its logs."""

    def __init__(self, folder: Path, how: str, nproc: int = 2, leave_seconds: float = 60.0, **env: str):
        self.folder = folder
        (folder / "rank.py").write_text(RANK)
        arguments = [folder, how, nproc, leave_seconds]
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *map(str, arguments)],
            cwd=REPOSITORY,
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_a_step(self) -> None:
        """Until every rank has handlers and is in its loop."""
        assert self.process.stdout is not None
        assert any(line == "a step\n" for line in self.process.stdout)

    def wait_for_death(self, rank: int) -> None:
        """Until a rank is gone: it holds this lock while it lives."""
        with (self.folder / f"rank_{rank}.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)

    def finish(self) -> tuple[int, str, str]:
        """Exit status, stdout and stderr."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err

    def log(self, rank: int) -> str:
        """What a rank wrote over all launches into this folder."""
        return (self.folder / f"logs/rank_{rank}.log").read_text()
