"""How long all-reduces take the processes of a job before they train: within nodes, between two, and over all."""

import json
import os
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megakernel.parallel.processes import ProcessEnvironment
from megakernel.parallel.rendezvous import meet

from .slow_nodes import Timing, rounds

GIVE_UP = timedelta(seconds=60)
"""For an all-reduce, connections included: one that lasts longer has failed."""

_REPEATS = 3

_REASON_LENGTH = 120
"""Characters of a reason: srun keeps lines of up to 1,024 bytes whole, and tears longer ones apart."""


def time_collectives(place: ProcessEnvironment, node: str, mib: int) -> Iterator[Timing]:
    """Meet the other processes where they are going to meet, and yield what each all-reduce that this one is in took.

    node: name of this machine. mib: size of the float32 tensor that is summed, MiB. A failure is a Timing too.
    """
    try:
        store = meet(place, 2 * GIVE_UP, wait=False)
    except RuntimeError as error:
        yield Timing(place.rank, node, [node], None, _one_line(error))
        return
    yield from timings(store, place, node, mib)


def timings(store: dist.Store, place: ProcessEnvironment, node: str, mib: int) -> Iterator[Timing]:
    """Yield the timings of processes that share a store already."""
    # A collective that lasts too long is an error to go on after; by itself NCCL would end the process.
    os.environ |= {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    store.set(f"node/{place.rank}", node)
    try:
        if place.rank == 0:
            _plan(store, place.world_size)
        for number, part in enumerate(json.loads(store.get(f"plan/{node}"))):
            if part is not None:
                group, ranks = part
                yield _timing(dist.PrefixStore(f"round {number}", store), place, node, group, ranks, mib)
            _arrive(store, place, f"round {number}")
        # The process that serves the store leaves last.
        _arrive(store, place, "end", wait=place.rank == 0)
    except dist.DistError:
        return  # another process is gone; what its node did not report tells whose fault that is


def _plan(store: dist.Store, world_size: int) -> None:
    """Tell each node which all-reduces its processes are in, so that one process reads where all are, and not each.

    A list with an item for each round: nodes and ranks of the all-reduce; both empty where all take part; None where
    the node has none.
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
    store: dist.Store, place: ProcessEnvironment, node: str, group: list[str], ranks: list[int], mib: int
) -> Timing:
    try:
        own = dist.PrefixStore("+".join(group), store)
        return Timing(place.rank, node, group, _seconds(own, place, ranks, mib))
    except RuntimeError as error:  # of connections, devices and collectives alike
        return Timing(place.rank, node, group, None, _one_line(error))


def _seconds(store: dist.Store, place: ProcessEnvironment, ranks: list[int], mib: int) -> float:
    """The median of a few, after one that makes connections."""
    # No default group: what a failed one leaves in torch.distributed would make the next one fail too.
    member = store, *((ranks.index(place.rank), len(ranks)) if ranks else (place.rank, place.world_size))
    group: Any
    if torch.cuda.is_available():
        device = torch.device("cuda", place.local_rank)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = GIVE_UP
        group = dist.ProcessGroupNCCL(*member, options)
    else:
        device = torch.device("cpu")
        group = dist.ProcessGroupGloo(*member, GIVE_UP)
    try:
        numbers = torch.zeros(mib << 18, device=device)
        found = []
        for _ in range(1 + _REPEATS):
            begin = time.perf_counter()
            group.allreduce([numbers]).wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found.append(time.perf_counter() - begin)
        return sorted(found[1:])[_REPEATS // 2]
    finally:
        group.shutdown()


def _arrive(store: dist.Store, place: ProcessEnvironment, where: str, wait: bool = True) -> None:
    """Tell the others, and wait for them: those that were in no failing group wait for those that were."""
    if store.add(f"arrived at {where}", 1) == place.world_size:
        store.set(f"all at {where}", "")
    if wait:
        store.wait([f"all at {where}"], 2 * GIVE_UP)


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # PyTorch puts the place in its source, and the condition that did not hold, before the reason.
    return (
        re.sub(r"^\[enforce fail[^]]*\] .*?\. ", "", lines[0])[:_REASON_LENGTH]
        if lines
        else type(error).__name__
    )
