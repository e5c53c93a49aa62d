"""Where the processes of a world meet before they have groups: a store that rank 0 serves."""

import os
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
