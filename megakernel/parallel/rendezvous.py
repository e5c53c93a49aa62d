"""Where the processes of a world meet before they have groups: a store that rank 0 serves."""

import os
import resource
import socket
from datetime import timedelta

import torch.distributed as dist

from .processes import ProcessEnvironment


def meet(process: ProcessEnvironment, timeout: timedelta, wait: bool = True) -> dist.Store:
    """The store that every process of the world can write to and read; one process meets nobody.

    It is where torchrun's variables say (MASTER_ADDR, MASTER_PORT), else where `process` does.

    timeout: of waiting for the others, and of each question. wait: come back when all are there, not before.
    Raises torch.distributed.DistError where that takes too long.
    """
    if process.world_size == 1:
        return dist.HashStore()
    address = os.environ.get("MASTER_ADDR") or process.master_address
    port = int(os.environ.get("MASTER_PORT") or process.master_port)
    is_master = process.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    listener = None
    if is_master:
        _allow_files(2 * process.world_size)  # connections: one of each process, and one of its watchdog
    if is_master and address == "127.0.0.1":
        # By itself the store listens on every interface, and gives whoever asks what it holds.
        listener = socket.create_server((address, port)).detach()
    return dist.TCPStore(
        address,
        port,
        process.world_size,
        is_master,
        timeout,
        wait_for_workers=wait,
        master_listen_fd=listener,
    )


def _allow_files(more: int) -> None:
    """Let this process open so many more, as far as it may: systems often stop it at a thousand unless it asks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        wanted = soft + more if hard == resource.RLIM_INFINITY else min(soft + more, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
