"""The rendezvous of all processes before there are process groups: a store served by rank 0."""

import os
import resource
import socket
from datetime import timedelta

import torch.distributed as dist

from .processes import ProcessEnvironment


def connect_store(process: ProcessEnvironment, timeout: timedelta, wait: bool = True) -> dist.Store:
    """Connect to the store of all processes; a local store for a single process.

    The address is torchrun's MASTER_ADDR and MASTER_PORT if set, else that of `process`.

    timeout: of waiting for the others, and of each request. wait: return only after all processes have connected.
    Raises torch.distributed.DistError on timeout.
    """
    if process.world_size == 1:
        return dist.HashStore()
    address = os.environ.get("MASTER_ADDR") or process.master_address
    port = int(os.environ.get("MASTER_PORT") or process.master_port)
    is_master = process.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    listener = None
    if is_master:
        _raise_file_limit(2 * process.world_size)  # two connections per process: its own, and its watchdog's
    if is_master and address == "127.0.0.1":
        # By default the store listens on all interfaces, without authentication.
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


def _raise_file_limit(more: int) -> None:
    """Raise the soft limit of open files by `more`, up to the hard limit; its default is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        limit = soft + more if hard == resource.RLIM_INFINITY else min(soft + more, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
