"""What a job of a thousand nodes costs beside its training: requests, bytes, lines and files, counted.

    python -m benchmarks.scaling

Runs the library's own code once for each process of the job against a store that counts what it is asked. Nothing is
timed, and nobody is waited for: no network, no GPU, no Slurm. In place of all-reduces stand constants; in place of
srun's pipes stands what Slurm's source says of them (`through_srun`). Where processes must run side by side (a job that
stands still, a save) THREADS of them do, and what was counted of them stands for the others.
"""

import argparse
import os
import random
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from benchmarks.page import opening, table, table_row
from launch.slurm import collectives, preflight
from megakernel.checkpoint.folder import CheckpointFolder
from megakernel.checkpoint.manifest import Checkpoint, FileRecord, SavedProgress, write_manifest
from megakernel.config.cluster import Cluster
from megakernel.parallel import Mesh
from megakernel.parallel import progress as progress_of
from megakernel.parallel.processes import ProcessEnvironment
from megakernel.parallel.ranks import Ranks
from megakernel.training import events, process, watchdog

MESSAGE_BYTES = 1024
"""Bytes of a task's output that Slurm sends to srun at once (SLURM_IO_MAX_MSG_LEN in src/common/io_hdr.h)."""

LOADS = (0.01, 0.1, 0.5)
"""Shares of its time in which srun writes what nodes have sent."""

Counts = dict[str, float]


_adding = threading.Lock()


class CountingStore(dist.Store):
    """A store that keeps values in this process and counts keys that are written, read and waited for.

    It waits for nobody: whoever asks for a value must come after whoever writes it.
    """

    def __init__(self, values: dict[str, bytes] | None = None) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {} if values is None else values
        self.keys: Counter[str] = Counter()
        self.bytes = 0

    def _count(self, kind: str, *parts: bytes | str) -> None:
        self.keys[kind] += 1
        self.bytes += sum(map(len, parts))

    def clone(self) -> "CountingStore":
        """Another connection, with counts of its own."""
        return CountingStore(self.values)

    def set(self, key: str, value: bytes | str) -> None:
        """Write one value."""
        self._count("written", key, value)
        self.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        """Read one value."""
        self._count("read", key, self.values[key])
        return self.values[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Read several."""
        return [self.get(key) for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there."""
        for key in keys:
            self._count("looked for", key)
        return all(key in self.values for key in keys)

    def add(self, key: str, number: int) -> int:
        """Add to a counter."""
        self._count("written", key)
        with _adding:
            total = int(self.values.get(key, 0)) + number
            self.values[key] = str(total).encode()
        return total

    def wait(self, keys: Sequence[str], *timeout: Any) -> None:
        """Wait for keys."""
        for key in keys:
            self._count("waited for", key)

    @property
    def total(self) -> int:
        """Keys of all kinds."""
        return sum(self.keys.values())


def world(nodes: int, tasks: int) -> Iterator[tuple[ProcessEnvironment, str]]:
    """Each process of a job and its node, as srun numbers them."""
    for rank in range(nodes * tasks):
        yield ProcessEnvironment(rank, nodes * tasks, rank % tasks, tasks), _name(rank // tasks)


def _name(node: int) -> str:
    return f"node{node:04d}"


def looked_at(nodes: int, tasks: int) -> tuple[CountingStore, dict[str, list[list[str]]]]:
    """The store that all processes asked before a run starts, and node -> the lines that each of its tasks prints."""
    store, printed = CountingStore(), {_name(node): [[] for _ in range(tasks)] for node in range(nodes)}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        report = _report(Path(folder), tasks)
        stack.enter_context(patch.object(preflight, "look", lambda _, node: replace(report, node=node)))
        stack.enter_context(patch.object(collectives, "_seconds", lambda *_: 0.0123456789012345))
        stack.enter_context(patch.object(collectives, "meet", lambda *_, **__: store))
        for place, node in world(nodes, tasks):  # in a job all have said where they are when the first asks
            store.values[f"node/{place.rank}"] = node.encode()
        for place, node in world(nodes, tasks):
            said = printed[node][place.local_rank]
            with (
                patch.object(preflight, "joined", lambda place=place: place),
                patch.object(preflight, "print", lambda line, said=said, **_: said.append(line), create=True),
            ):
                preflight._look_and_measure(Path(folder), node, mib=1)
    return store, printed


def _report(folder: Path, gpus: int) -> preflight.NodeReport:
    """The report of this machine, with as many GPUs."""
    driver = folder / "nvidia-smi"
    driver.write_text("#!/bin/sh\n" + "echo 1234, 81559\n" * gpus)
    driver.chmod(0o755)
    with patch.dict(os.environ, {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}):
        return preflight.look(folder, _name(0))


def through_srun(printed: dict[str, list[list[str]]], load: float) -> list[str]:
    """The lines that srun writes, whose nodes begin to send at random within a time of which it needs a share, `load`.

    By `_task_build_message` of Slurm's src/slurmd/slurmstepd/io.c: a message is a line of a task; of a line that is
    longer than MESSAGE_BYTES it is as much as fits. srun writes one message of each node that sends in turn.
    """
    nodes = [deque(_messages(tasks)) for tasks in printed.values()]
    chance = random.Random(0)
    span = sum(map(len, nodes)) / load
    coming = deque(
        sorted(((chance.uniform(0, span), messages) for messages in nodes), key=lambda one: one[0])
    )
    sending: deque[deque[str]] = deque()
    written: list[str] = []
    now = 0.0
    while coming or sending:
        now = now + 1 if sending else max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            sending.append(coming.popleft()[1])
        written.append(sending[0].popleft())
        if not sending[0]:
            sending.popleft()
        sending.rotate(-1)
    return "".join(written).splitlines()


def _messages(tasks: Sequence[Sequence[str]]) -> Iterator[str]:
    """The messages of a node, one all-reduce after the other, in which its tasks print at the same time."""
    for number in range(max(map(len, tasks))):
        for lines in tasks:
            for line in lines[number : number + 1]:
                text = line + "\n"
                yield from (text[at : at + MESSAGE_BYTES] for at in range(0, len(text), MESSAGE_BYTES))


def preflight_counts(nodes: int, tasks: int) -> Counts:
    """Counts of the preflight, before the processes of a run start."""
    store, printed = looked_at(nodes, tasks)
    lines = [len(line) + 1 for said in printed.values() for task in said for line in task]
    tasks_bytes = [sum(len(line) + 1 for line in task) for said in printed.values() for task in said]
    found: Counts = {
        "preflight: lines": len(lines),
        "preflight: longest line, bytes": max(lines),
        "preflight: most bytes of a task": max(tasks_bytes),
        "preflight: bytes of all": sum(tasks_bytes),
        "preflight: keys asked of the store": store.total,
        "preflight: bytes through the store": store.bytes,
    }
    for load in LOADS:
        lines_read = through_srun(printed, load)
        bad = preflight.judge(lines_read, list(printed), tasks, Cluster().preflight_seconds)
        found[f"preflight: healthy nodes excluded, srun {load:.0%} busy"] = len(bad.keys() & printed.keys())
    return found


THREADS = 64


class _Left(BaseException):
    """Stands for the end of a process."""


def stall_counts(nodes: int, tasks: int) -> Counts:
    """Counts of a stalled job, in which each process detects the stall."""
    store, size = CountingStore(), nodes * tasks
    dogs = [_watchdog(rank, size, store) for rank in range(size)]
    for dog in dogs:
        dog._tell()
        dog._tell_every = 0.2  # enough for all threads to get their turn
    asking, said = dogs[:: max(1, size // THREADS)], []

    def end(dog: watchdog.Watchdog) -> None:
        dog._store = dog._store.clone()
        with suppress(_Left):
            dog._end()

    with (
        patch.object(os, "_exit", side_effect=_Left),
        patch.object(watchdog.faulthandler, "dump_traceback"),
        patch.object(watchdog, "print", lambda line, **_: said.append(line), create=True),
    ):
        on_threads(asking, end)
    most, *others = sorted((dog._store.total for dog in asking), reverse=True)
    return {
        "watchdog: messages a second while training": messages_a_second(size),
        "watchdog: keys that one rank asks for in a stall": most,
        "watchdog: keys that each other rank asks for": sum(others) / len(others),
        "watchdog: keys that all ask for": most + (size - 1) * sum(others) / len(others),
        "watchdog: bytes of an explanation": max(map(len, said)),
        "watchdog: different explanations": len(set(said)),
    }


def _watchdog(rank: int, size: int, store: CountingStore) -> watchdog.Watchdog:
    place: Any = SimpleNamespace(rank=rank, world_size=size, store=store)
    place.progress = progress_of.Progress(4, 9, "forward")
    return watchdog.Watchdog(place, start_minutes=10, stall_minutes=5)


def messages_a_second(size: int) -> float:
    """Messages per second between the processes of a job that trains."""
    return size / _watchdog(0, size, CountingStore())._tell_every


def on_threads(items: Sequence[Any], work: Callable[[Any], Any]) -> None:
    """Work on all items at the same time, a thread each."""
    with ThreadPoolExecutor(len(items)) as pool:
        list(pool.map(work, items))


def save_counts(root: Path) -> Counts:
    """Counts of a save in which each of THREADS ranks writes one file."""
    synced: Counter[int] = Counter()
    rank_of = threading.local()
    given: list[Any] = [None] * THREADS
    taken: list[Any] = []
    barrier = threading.Barrier(THREADS, lambda: taken.__setitem__(slice(None), [list(given)]))

    def save(rank: int) -> None:
        def exchange(value: Any) -> list[Any]:
            given[rank] = value
            barrier.wait()
            return taken[0]

        def write(folder: Path) -> None:
            (folder / f"rank_{rank}").write_bytes(b"x")

        def written() -> list[Path]:
            return list(root.glob(f"*/rank_{rank}"))

        rank_of.value = rank
        folder = CheckpointFolder(root, keep=1, ranks=Ranks(rank, THREADS, exchange))
        folder.save(SavedProgress(1, 0, 0, {}, {}), write, written)

    with patch.object(os, "fsync", lambda handle: synced.update([rank_of.value])):
        on_threads(range(THREADS), save)
    return {
        "save: files and folders flushed by rank 0": synced[0],
        "save: most files flushed by another rank": max(synced[rank] for rank in range(1, THREADS)),
    }


def manifest_counts(nodes: int, tasks: int, folder: Path) -> Counts:
    """Bytes of a checkpoint's manifest, which rank 0 reads for all."""
    size = nodes * tasks
    folder.mkdir()
    for rank in range(size):  # as DeepSpeed names them
        (folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(b"x")
    write_manifest(
        folder, SavedProgress(1, 0, 0, {}, {}), {file.name: FileRecord.of(file) for file in folder.iterdir()}
    )
    mesh = object.__new__(Mesh)
    mesh.rank, mesh.world_size, mesh.device = 0, size, torch.device("cpu")
    received = 0

    def all_gather(outputs: list[torch.Tensor], own: torch.Tensor, group: Any = None) -> None:
        nonlocal received
        received += sum(output.nbytes for output in outputs)
        if own.numel() == 1:  # sizes; what else a process would receive is not looked at
            for output in outputs:
                output.copy_(own)

    def broadcast(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        nonlocal received
        received += tensor.nbytes

    with (
        _fake_world(size),
        patch.object(distributed_c10d, "all_gather", all_gather),
        patch.object(distributed_c10d, "broadcast", broadcast),
        patch.object(distributed_c10d, "_tensor_to_object", lambda *_: found),
    ):
        found = Checkpoint.read(folder)
        Ranks.of(mesh).first(lambda: found)
    return {"manifest: bytes that a rank receives of it": received}


@contextmanager
def _fake_world(size: int) -> Iterator[None]:
    """A default group of torch.distributed that is rank 0 of `size`, and speaks to nobody."""
    from torch.testing._internal.distributed import fake_pg  # registers the backend

    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def failure_counts(nodes: int, tasks: int, run: Path) -> Counts:
    """Events of a failure that ends every process of a job at once."""
    (run / "logs" / "7" / "0").mkdir(parents=True)
    with patch.dict(os.environ, {events.JOB_VARIABLE: "7", events.RESTART_VARIABLE: "0"}):
        for place, _ in world(nodes, tasks):
            process._record_failure(run, place.rank, "DistBackendError: connection reset by peer")
    return {"failure: events that one cause leaves": len(events.read(run))}


def counts(nodes: int, tasks: int) -> Counts:
    """All of them."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            **preflight_counts(nodes, tasks),
            **stall_counts(nodes, tasks),
            **save_counts(Path(folder, "checkpoints")),
            **manifest_counts(nodes, tasks, Path(folder, "step_1")),
            **failure_counts(nodes, tasks, Path(folder, "run")),
        }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--tasks", type=int, default=8, help="processes of each node")
    args = parser.parse_args()
    rows = (table_row([name, f"{count:,.0f}"]) for name, count in counts(args.nodes, args.tasks).items())
    head = opening("What a large job costs beside its training", "python -m benchmarks.scaling")
    print("\n".join([*head, *table(["", f"{args.nodes} nodes x {args.tasks}"], rows)]))


if __name__ == "__main__":
    main()
