"""Times all-reduces of a job's processes before training: within nodes, between pairs of nodes, and over all."""

import json
import os
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megakernel.config import UserError
from megakernel.parallel.device import cuda_index
from megakernel.parallel.processes import ProcessEnvironment
from megakernel.parallel.rendezvous import connect_store

from .slow_nodes import Timing, rounds


def timeout(processes: int) -> timedelta:
    """Timeout of an all-reduce of so many processes, including its connections: 61 s for 16, 9 minutes for 8,192.

    NCCL's first process and the job's store take the connections of all others one after the other. The time for each
    is an allowance, not a measurement: a preflight must not fail because a job is large.
    """
    return timedelta(seconds=60 + processes * 60 / 1024)


_REPEATS = 3

_REASON_LENGTH = 120
"""Most characters of an error text: srun splits lines of more than 1,024 bytes."""


def time_collectives(process: ProcessEnvironment, node: str, mib: int) -> Iterator[Timing]:
    """Rendezvous as training will, and yield the Timing of each all-reduce that this process takes part in.

    node: name of this machine. mib: size of the float32 tensor, MiB. A failure is a Timing, too.
    """
    try:
        store = connect_store(process, 2 * timeout(process.world_size), wait=False)
    except RuntimeError as error:
        yield Timing(process.rank, node, [node], None, _one_line(error))
        return
    yield from timings(store, process, node, mib)


def timings(store: dist.Store, process: ProcessEnvironment, node: str, mib: int) -> Iterator[Timing]:
    """Yield the timings of a process that shares a store with the others."""
    # A timeout should raise an error that can be caught; by default NCCL ends the process.
    os.environ |= {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    store.set(f"node/{process.rank}", node)
    try:
        if process.rank == 0:
            _store_plans(store, process.world_size)
        for number, part in enumerate(json.loads(store.get(f"plan/{node}"))):
            if part is not None:
                group, ranks = part
                yield _timing(dist.PrefixStore(f"round {number}", store), process, node, group, ranks, mib)
            _barrier(store, process, f"round {number}")
        # The process that serves the store exits last.
        _barrier(store, process, "end", wait=process.rank == 0)
    except dist.DistError:
        return  # another process died; its node is identified by its missing timings


def _store_plans(store: dist.Store, world_size: int) -> None:
    """Store for each node the all-reduces of its processes, so that only rank 0 reads the nodes of all ranks.

    A list with an item per round: nodes and ranks of the all-reduce, both empty if all take part; None without one.
    """
    members: dict[str, list[int]] = {}
    for rank, name in enumerate(store.multi_get([f"node/{rank}" for rank in range(world_size)])):
        members.setdefault(name.decode(), []).append(rank)
    plans: dict[str, list[tuple[list[str], list[int]] | None]] = {node: [] for node in members}
    for groups in rounds(list(members)):
        part_of: dict[str, tuple[list[str], list[int]]] = {}
        for group in groups:
            ranks = sorted(rank for node in group for rank in members[node])
            if len(ranks) > 1:
                part_of |= dict.fromkeys(group, (group, ranks) if len(group) < 3 else ([], []))
        for node, plan in plans.items():
            plan.append(part_of.get(node))
    for node, plan in plans.items():
        store.set(f"plan/{node}", json.dumps(plan))


def _timing(
    store: dist.Store, process: ProcessEnvironment, node: str, group: list[str], ranks: list[int], mib: int
) -> Timing:
    try:
        group_store = dist.PrefixStore("+".join(group), store)
        return Timing(process.rank, node, group, _seconds(group_store, process, ranks, mib))
    except (RuntimeError, UserError) as error:  # of connections, devices and collectives alike
        return Timing(process.rank, node, group, None, _one_line(error))


def _seconds(store: dist.Store, process: ProcessEnvironment, ranks: list[int], mib: int) -> float:
    """The median of a few all-reduces, after one that connects."""
    # No default group: a failed one leaves state in torch.distributed that makes the next one fail.
    rank, size = (ranks.index(process.rank), len(ranks)) if ranks else (process.rank, process.world_size)
    group: Any
    if torch.cuda.is_available():
        device = torch.device("cuda", cuda_index(process.local_rank))
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout(size)
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    else:
        device = torch.device("cpu")
        group = dist.ProcessGroupGloo(store, rank, size, timeout(size))
    try:
        numbers = torch.zeros(mib << 18, device=device)
        seconds = []
        for _ in range(1 + _REPEATS):
            started = time.perf_counter()
            group.allreduce([numbers]).wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - started)
        return sorted(seconds[1:])[_REPEATS // 2]
    finally:
        group.shutdown()


def _barrier(store: dist.Store, process: ProcessEnvironment, name: str, wait: bool = True) -> None:
    """A barrier: processes whose group succeeded wait for those whose group timed out."""
    if store.add(f"arrived at {name}", 1) == process.world_size:
        store.set(f"all at {name}", "")
    if wait:
        store.wait([f"all at {name}"], 2 * timeout(process.world_size))


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # PyTorch puts its source line and the failed condition before the reason.
    return re.sub(r"^\[enforce fail[^]]*\] .*?\. ", "", lines[0])[:_REASON_LENGTH]
