"""Overhead of a job of a thousand nodes besides its training: requests, bytes, lines and files, counted.

    python -m benchmarks.scaling

Runs the library's own code once for each process of the job, against a store that counts requests. Nothing is timed,
and there is no network, GPU or Slurm. All-reduces are replaced by constants, and srun's pipes by a simulation from
Slurm's source (`srun_output`). Where processes must run concurrently (a stalled job, a save), THREADS of them do, and
their counts stand for the others.
"""

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

from benchmarks.file_operations import file_operations
from benchmarks.page import docstring_parser, page_header, table, table_row
from benchmarks.scaling_data import blend_counts, merge_counts, part_counts, start_counts
from launch.slurm import collectives, preflight
from megakernel.checkpoint.folder import CheckpointFolder
from megakernel.checkpoint.manifest import SavedCheckpoint, SavedFile, SavedProgress, flushed, write_manifest
from megakernel.config import Config, Parallel
from megakernel.config.cluster import Cluster
from megakernel.parallel import Mesh
from megakernel.parallel import mesh as mesh_of
from megakernel.parallel import progress as progress_of
from megakernel.parallel.device import prepare_device
from megakernel.parallel.processes import ProcessEnvironment
from megakernel.parallel.ranks import Ranks
from megakernel.training import events, process, watchdog

MESSAGE_BYTES = 1024
"""Bytes of a task's output per message to srun (SLURM_IO_MAX_MSG_LEN in Slurm's src/common/io_hdr.h)."""

LOADS = (0.01, 0.1, 0.5)
"""Shares of the time in which srun is busy writing the nodes' output."""

Counts = dict[str, float]


_counter_lock = threading.Lock()


class CountingStore(dist.Store):
    """A store in this process that counts the keys that are written, read and waited for.

    It never blocks: a key must be written before it is read.
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
        """Another connection to the same values, with its own counts."""
        return CountingStore(self.values)

    def set(self, key: str, value: bytes | str) -> None:
        """Count and write one value."""
        self._count("written", key, value)
        self.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        """Count and read one value."""
        self._count("read", key, self.values[key])
        return self.values[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Count and read several values."""
        return [self.get(key) for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        """Count the look-ups and return whether all keys exist."""
        for key in keys:
            self._count("looked for", key)
        return all(key in self.values for key in keys)

    def add(self, key: str, number: int) -> int:
        """Count and add to a counter."""
        self._count("written", key)
        with _counter_lock:
            total = int(self.values.get(key, 0)) + number
            self.values[key] = str(total).encode()
        return total

    def wait(self, keys: Sequence[str], *timeout: Any) -> None:
        """Count the keys that would be waited for."""
        for key in keys:
            self._count("waited for", key)

    @property
    def total(self) -> int:
        """Keys of all requests."""
        return sum(self.keys.values())


def processes(nodes: int, tasks: int) -> Iterator[tuple[ProcessEnvironment, str]]:
    """Each process of a job and its node, as srun numbers them."""
    for rank in range(nodes * tasks):
        yield ProcessEnvironment(rank, nodes * tasks, rank % tasks, tasks), _name(rank // tasks)


def _name(node: int) -> str:
    return f"node{node:04d}"


def run_preflight(nodes: int, tasks: int) -> tuple[CountingStore, dict[str, list[list[str]]]]:
    """Run the preflight of all processes; returns its store, and node -> the lines that each of its tasks prints."""
    store, printed = CountingStore(), {_name(node): [[] for _ in range(tasks)] for node in range(nodes)}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        report = _report(Path(folder), tasks)
        stack.enter_context(
            patch.object(preflight, "node_report", lambda _, node, *__: replace(report, node=node))
        )
        stack.enter_context(patch.object(collectives, "_seconds", lambda *_: 0.0123456789012345))
        stack.enter_context(patch.object(collectives, "connect_store", lambda *_, **__: store))
        # In a job all write this before the first one reads it.
        for environment, node in processes(nodes, tasks):
            store.values[f"node/{environment.rank}"] = node.encode()
        for environment, node in processes(nodes, tasks):
            lines = printed[node][environment.local_rank]
            with (
                patch.object(preflight, "launched_process", lambda environment=environment: environment),
                patch.object(
                    preflight, "print", lambda line, lines=lines, **_: lines.append(line), create=True
                ),
            ):
                preflight._print_report_and_timings(Path(folder), node, mib=1)
    return store, printed


def _report(folder: Path, gpus: int) -> preflight.NodeReport:
    """The preflight report of a node with this many GPUs, from a fake nvidia-smi."""
    driver = folder / "nvidia-smi"
    driver.write_text("#!/bin/sh\n" + "echo 1234, 81559\n" * gpus)
    driver.chmod(0o755)
    with patch.dict(os.environ, {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}):
        return preflight.node_report(folder, _name(0))


def srun_output(printed: dict[str, list[list[str]]], load: float) -> list[str]:
    """The lines that srun writes if nodes start sending at random times; load: the share of that time it is busy.

    From `_task_build_message` in Slurm's src/slurmd/slurmstepd/io.c: a message is one line of a task, or the next
    MESSAGE_BYTES of a longer line. srun writes one message of each sending node in turn.
    """
    nodes = [deque(_messages(tasks)) for tasks in printed.values()]
    generator = random.Random(0)
    span = sum(map(len, nodes)) / load
    starting = deque(
        sorted(((generator.uniform(0, span), messages) for messages in nodes), key=lambda one: one[0])
    )
    sending: deque[deque[str]] = deque()
    written: list[str] = []
    now = 0.0
    while starting or sending:
        now = now + 1 if sending else max(now, starting[0][0])
        while starting and starting[0][0] <= now:
            sending.append(starting.popleft()[1])
        written.append(sending[0].popleft())
        if not sending[0]:
            sending.popleft()
        sending.rotate(-1)
    return "".join(written).splitlines()


def _messages(tasks: Sequence[Sequence[str]]) -> Iterator[str]:
    """The messages of a node: its tasks print at the same time, once for each all-reduce."""
    for number in range(max(map(len, tasks))):
        for lines in tasks:
            for line in lines[number : number + 1]:
                text = line + "\n"
                yield from (text[at : at + MESSAGE_BYTES] for at in range(0, len(text), MESSAGE_BYTES))


def preflight_counts(nodes: int, tasks: int) -> Counts:
    """Counts of the preflight, which runs before the training processes start."""
    store, printed = run_preflight(nodes, tasks)
    lines = [len(line) + 1 for of_node in printed.values() for task in of_node for line in task]
    tasks_bytes = [sum(len(line) + 1 for line in task) for of_node in printed.values() for task in of_node]
    result: Counts = {
        "preflight: lines": len(lines),
        "preflight: longest line, bytes": max(lines),
        "preflight: most bytes of a task": max(tasks_bytes),
        "preflight: bytes of all": sum(tasks_bytes),
        "preflight: keys asked of the store": store.total,
        "preflight: bytes through the store": store.bytes,
    }
    for load in LOADS:
        lines_read = srun_output(printed, load)
        bad = preflight.unfit_nodes(lines_read, list(printed), tasks, Cluster().preflight_seconds)
        result[f"preflight: healthy nodes excluded, srun {load:.0%} busy"] = len(bad.keys() & printed.keys())
    return result


THREADS = 64


class _Exited(BaseException):
    """Raised in place of `os._exit`."""


def stall_counts(nodes: int, tasks: int) -> Counts:
    """Counts of a stalled job, in which each process detects the stall."""
    store, size = CountingStore(), nodes * tasks
    watchdogs = [_watchdog(rank, size, store) for rank in range(size)]
    for dog in watchdogs:
        dog._report()
        dog._report_every = 0.2  # enough for all threads to get their turn
    sampled, explanations = watchdogs[:: max(1, size // THREADS)], []

    def end(dog: watchdog.Watchdog) -> None:
        dog._store = dog._store.clone()
        with suppress(_Exited):
            dog._exit_stalled()

    with (
        patch.object(os, "_exit", side_effect=_Exited),
        patch.object(watchdog.faulthandler, "dump_traceback"),
        patch.object(watchdog, "print", lambda line, **_: explanations.append(line), create=True),
    ):
        run_on_threads(sampled, end)
    most, *others = sorted((dog._store.total for dog in sampled), reverse=True)
    return {
        "watchdog: messages a second while training": messages_a_second(size),
        "watchdog: keys that one rank asks for in a stall": most,
        "watchdog: keys that each other rank asks for": sum(others) / len(others),
        "watchdog: keys that all ask for": most + (size - 1) * sum(others) / len(others),
        "watchdog: bytes of an explanation": max(map(len, explanations)),
        "watchdog: different explanations": len(set(explanations)),
    }


def _watchdog(rank: int, size: int, store: CountingStore) -> watchdog.Watchdog:
    mesh: Any = SimpleNamespace(rank=rank, world_size=size, store=store)
    mesh.progress = progress_of.Progress(4, 9, "forward")
    return watchdog.Watchdog(mesh, start_minutes=10, stall_minutes=5)


def messages_a_second(size: int) -> float:
    """Messages per second between the processes of a job that trains."""
    return size / _watchdog(0, size, CountingStore())._report_every


def run_on_threads(items: Sequence[Any], work: Callable[[Any], Any]) -> None:
    """Apply `work` to all items concurrently, each in its own thread."""
    with ThreadPoolExecutor(len(items)) as pool:
        list(pool.map(work, items))


def save_counts(root: Path) -> Counts:
    """Counts of a save in which each of THREADS ranks writes one file."""
    synced: Counter[int] = Counter()
    rank_of = threading.local()
    values: list[Any] = [None] * THREADS
    gathered: list[Any] = []
    barrier = threading.Barrier(THREADS, lambda: gathered.__setitem__(slice(None), [list(values)]))

    def save(rank: int) -> None:
        def exchange(value: Any) -> list[Any]:
            values[rank] = value
            barrier.wait()
            return gathered[0]

        def write(folder: Path) -> dict[str, SavedFile]:
            file = folder / f"rank_{rank}"
            file.write_bytes(b"x")
            return flushed(folder, [file])

        rank_of.value = rank
        folder = CheckpointFolder(root, keep=1, ranks=Ranks(rank, THREADS, exchange))
        folder.save(SavedProgress(1, 0, 0, {}, {}), write)

    with patch.object(os, "fsync", lambda handle: synced.update([rank_of.value])):
        run_on_threads(range(THREADS), save)
    return {
        "save: files and folders flushed by rank 0": synced[0],
        "save: most files flushed by another rank": max(synced[rank] for rank in range(1, THREADS)),
    }


def prune_counts(nodes: int, tasks: int, root: Path, keep: int = 3) -> Counts:
    """File operations of rank 0's thread for a save: to publish a checkpoint with a file of each rank, and to prune."""
    size = nodes * tasks
    folder = CheckpointFolder(root, keep=keep)

    def write(partial: Path) -> dict[str, SavedFile]:
        for rank in range(size):
            (partial / f"rank_{rank}").write_bytes(b"x")
        # Other ranks have flushed theirs, and send rank 0 the checksums.
        return {f"rank_{rank}": SavedFile(1, "0") for rank in range(size)}

    counted: dict[str, int] = {}
    with patch.object(os, "fsync", lambda handle: None):
        for step in range(1, keep + 3):
            for name in ("_publish", "_prune"):
                counted[name] = 0

            def count(name: str) -> Callable[..., Any]:
                call = getattr(CheckpointFolder, name)

                def counting(self: CheckpointFolder, *arguments: Any) -> Any:
                    with file_operations(root) as operations:
                        result = call(self, *arguments)
                    counted[name] = len(operations)
                    return result

                return counting

            with (
                patch.object(CheckpointFolder, "_publish", count("_publish")),
                patch.object(CheckpointFolder, "_prune", count("_prune")),
            ):
                folder.save(SavedProgress(step, 0, 0, {}, {}), write)
    return {
        "save: file operations of rank 0 to publish, for a file of a rank": counted["_publish"] / size,
        f"save: file operations of rank 0 to prune, keeping {keep}, for a file of a rank": counted["_prune"]
        / size,
    }


def manifest_counts(nodes: int, tasks: int, folder: Path) -> Counts:
    """Bytes of a checkpoint's manifest, which rank 0 reads and broadcasts."""
    size = nodes * tasks
    folder.mkdir()
    for rank in range(size):  # as DeepSpeed names them
        (folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(b"x")
    write_manifest(
        folder, SavedProgress(1, 0, 0, {}, {}), {file.name: SavedFile.of(file) for file in folder.iterdir()}
    )
    mesh = object.__new__(Mesh)
    mesh.rank, mesh.world_size, mesh.device = 0, size, torch.device("cpu")
    received = 0

    def all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None) -> None:
        nonlocal received
        received += sum(output.nbytes for output in outputs)
        if tensor.numel() == 1:  # sizes; the contents of other messages do not matter here
            for output in outputs:
                output.copy_(tensor)

    def broadcast(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        nonlocal received
        received += tensor.nbytes

    with (
        _fake_world(size),
        patch.object(distributed_c10d, "all_gather", all_gather),
        patch.object(distributed_c10d, "broadcast", broadcast),
        patch.object(distributed_c10d, "_tensor_to_object", lambda *_: checkpoint),
    ):
        checkpoint = SavedCheckpoint.read(folder)
        Ranks.of(mesh).on_rank_zero(lambda: checkpoint)
    return {"manifest: bytes that a rank receives of it": received}


@contextmanager
def _fake_world(size: int) -> Iterator[None]:
    """A fake default process group of torch.distributed: rank 0 of `size`, without communication."""
    from torch.testing._internal.distributed import fake_pg  # registers the backend

    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


TENSOR, STAGES = 8, 2
"""Tensor ranks, and pipeline stages of the second layout of `group_counts`."""


def group_counts(nodes: int, tasks: int) -> Counts:
    """Calls of the last rank that build process groups, and its groups; on GPUs all ranks take part in every call."""
    result: Counts = {}
    layouts = {
        f"tp {TENSOR}": Parallel(tensor=TENSOR),
        f"tp {TENSOR}, pp {STAGES}": Parallel(tensor=TENSOR, pipeline=STAGES),
    }
    for name, parallel in layouts.items():
        built, groups = _built_groups(parallel, nodes * tasks)
        result[f"start: collective calls that build groups, {name}"] = built
        result[f"start: groups of a rank, {name}"] = groups
    return result


def _built_groups(parallel: Parallel, size: int) -> tuple[int, int]:
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid
    from torch.testing._internal.distributed.fake_pg import FakeStore

    start, build, calls = dist.init_process_group, dist.new_group, 0

    def new_group(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return build(*args, **options)

    with (
        patch.object(mesh_of, "connect_store", lambda *_: FakeStore()),
        patch.object(dist, "init_process_group", lambda _, **options: start("fake", **options)),
        patch.object(dist, "new_group", new_group),
    ):
        mesh = Mesh.create(parallel, ProcessEnvironment(size - 1, size), prepare_device("cpu", 0))
        if parallel.pipeline > 1:  # as DeepSpeed's PipelineModule does
            PipelineParallelGrid(topology=mesh.topology)
        groups = len(distributed_c10d._world.pg_map)
        mesh.destroy()
    return calls, groups


WEIGHTS = {"num_layers": 32, "hidden_size": 64, "num_heads": 8, "vocab_size": 1024}
"""A model of as many layers as one of 7 billion weights; how often it is drawn does not depend on their width."""


def weight_counts(nodes: int, tasks: int) -> Counts:
    """The share of a model's initial weights that a rank draws: without `LayerStart`, and the most of some ranks."""
    size = nodes * tasks
    whole, _ = _drawn(Parallel(tensor=TENSOR), 0, size, shares=False)
    ranks = [0, min(TENSOR, size - 1), size - 1]
    drawn, broadcasts = zip(*(_drawn(Parallel(tensor=TENSOR), rank, size, shares=True) for rank in ranks))
    return {
        "initial weights: percent that a process draws at most": 100 * max(drawn) / whole,
        "initial weights: broadcasts that a process takes part in": max(broadcasts),
    }


def _drawn(parallel: Parallel, rank: int, size: int, shares: bool) -> tuple[int, int]:
    """Numbers that a rank draws for the initial weights, and broadcasts that it takes part in."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megakernel.model import build_model
    from megakernel.model.settings import ModelSettings, model_settings
    from megakernel.model.start import LayerStart

    init, draw = dist.init_process_group, ModelSettings.draw
    numbers = broadcasts = 0

    def broadcast(*_: Any, **__: Any) -> None:
        nonlocal broadcasts
        broadcasts += 1

    def counting(self: ModelSettings, matrix: torch.Tensor, fill: Callable[[torch.Tensor], object]) -> None:
        def count(whole: torch.Tensor) -> None:
            nonlocal numbers
            numbers += whole.numel()
            fill(whole)

        draw(self, matrix, count)

    config = Config(
        run={"name": "weights"},
        model=WEIGHTS,
        parallel=parallel,
        data={"train": ["corpus"]},
        training={"steps": 1, "seq_len": 64, "global_batch_size": size},
    )
    with (
        patch.object(mesh_of, "connect_store", lambda *_: FakeStore()),
        patch.object(dist, "init_process_group", lambda _, **options: init("fake", **options)),
        patch.object(ModelSettings, "draw", counting),
    ):
        mesh = Mesh.create(parallel, ProcessEnvironment(rank, size), prepare_device("cpu", 0))
        settings = model_settings(config, mesh, WEIGHTS["vocab_size"])
        start = LayerStart(mesh, torch.float32) if shares else None
        with patch.object(dist, "broadcast", broadcast):
            build_model(replace(settings, start=start))
        mesh.destroy()
    return numbers, broadcasts


def failure_counts(nodes: int, tasks: int, run: Path) -> Counts:
    """Events recorded when one failure ends every process of a job at once."""
    (run / "logs" / "7" / "0").mkdir(parents=True)
    with patch.dict(os.environ, {events.JOB_VARIABLE: "7", events.RESTART_VARIABLE: "0"}):
        for environment, _ in processes(nodes, tasks):
            process._record_failure(run, environment.rank, "DistBackendError: connection reset by peer")
    return {"failure: events that one cause leaves": len(events.read(run))}


def counts(nodes: int, tasks: int) -> Counts:
    """The counts of a job of so many nodes."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            **preflight_counts(nodes, tasks),
            **stall_counts(nodes, tasks),
            **save_counts(Path(folder, "checkpoints")),
            **manifest_counts(nodes, tasks, Path(folder, "step_1")),
            **failure_counts(nodes, tasks, Path(folder, "run")),
            **group_counts(nodes, tasks),
            **weight_counts(nodes, tasks),
            **prune_counts(nodes, tasks, Path(folder, "pruned")),
        }


def data_counts() -> Counts:
    """Counts that do not depend on the number of processes."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            **start_counts(Path(folder, "data")),
            **blend_counts(Path(folder, "blend")),
            **merge_counts(Path(folder, "merge")),
            **part_counts(Path(folder, "parts")),
        }


def _shown(count: float) -> str:
    return f"{count:,.0f}" if count >= 10 or count == round(count) else f"{count:.2g}"


def main() -> None:
    """Print a table."""
    parser = docstring_parser(__doc__)
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--tasks", type=int, default=8, help="processes of each node")
    args = parser.parse_args()
    found = {**counts(args.nodes, args.tasks), **data_counts()}
    rows = (table_row([name, _shown(count)]) for name, count in found.items())
    head = page_header("Overhead of a large job besides its training", "python -m benchmarks.scaling")
    print("\n".join([*head, *table(["", f"{args.nodes} nodes x {args.tasks}"], rows)]))


if __name__ == "__main__":
    main()
