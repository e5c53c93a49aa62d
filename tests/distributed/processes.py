"""Real ranks for tests: new processes for every call, forked from a server that has imported everything once."""

import faulthandler
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection, forkserver
from typing import Any

import torch
import torch.distributed as dist

from megakernel.config import Parallel
from megakernel.parallel.device import prepare_device
from megakernel.parallel.mesh import Mesh
from megakernel.parallel.processes import ProcessEnvironment

PRELOAD = ["pytest", "megakernel.training.trainer", "megakernel.uptraining.run"]
"""Modules that the server imports once, which would take seconds in every process."""

_SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONWARNINGS": "ignore::UserWarning,ignore::FutureWarning",
}
_GRACE = 5.0
"""Seconds that hanging ranks have to print their stacks."""
_CAUSE = 2.0
"""Seconds after a rank's error in which the death of another rank is still reported in its place."""

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(PRELOAD)


class RankFailedError(AssertionError):
    """A rank raised, died or did not finish; the message holds its traceback."""


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call `function(*args)` in `world_size` new processes and return what each returned, by rank.

    The processes see torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) with a
    port of their own. `function`, `args` and the results are pickled, tensors by value. The first failure
    kills the other ranks and is raised, but a rank that died goes before the lost connections of its peers;
    after `timeout` seconds each prints its stack.
    """
    with _environment(_SERVER_ENVIRONMENT):
        forkserver.ensure_running()
    # The store listens before any rank starts, on a port that the system chose: parallel tests cannot collide.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    call = pickle.dumps((function, args))
    workers = [_start(rank, world_size, store.port, call, timeout) for rank in range(world_size)]
    try:
        return _collect(workers, time.monotonic() + timeout + _GRACE)
    finally:
        for process, pipe in workers:
            process.kill()
            process.join()
            pipe.close()


def this_process() -> ProcessEnvironment:
    """This rank's environment, inside `run_ranks`."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return ProcessEnvironment(rank, world_size, rank, world_size, master_port=int(os.environ["MASTER_PORT"]))


@contextmanager
def cpu_mesh(**sizes: Any) -> Iterator[Mesh]:
    """The mesh of this rank, inside `run_ranks`; `sizes` are keys of the parallel section."""
    process = this_process()
    mesh = Mesh.create(Parallel(**sizes), process, prepare_device("cpu", process.local_rank))
    yield mesh
    mesh.destroy()


Worker = tuple[Any, connection.Connection]


def _start(rank: int, world_size: int, port: int, call: bytes, timeout: float) -> Worker:
    receive, send = _processes.Pipe(duplex=False)
    environment = ProcessEnvironment(rank, world_size, rank, world_size, master_port=port).variables()
    # With these variables of torchrun, torch uses the store that is already served.
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    process = _processes.Process(
        target=_work, args=(send, environment, call, timeout), name=f"rank {rank}", daemon=True
    )
    process.start()
    send.close()
    return process, receive


def _work(send: connection.Connection, environment: dict[str, str], call: bytes, timeout: float) -> None:
    faulthandler.dump_traceback_later(timeout)
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        function, args = pickle.loads(call)
        answer = (True, function(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    send.send_bytes(pickle.dumps(answer))


def _collect(workers: list[Worker], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(workers)}
    error: RankFailedError | None = None
    while waiting:
        ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise error or RankFailedError(f"ranks {sorted(waiting.values())} did not finish in time")
        for pipe in ready:
            assert isinstance(pipe, connection.Connection)
            rank = waiting.pop(pipe)
            fine, value = _answer(rank, pipe, workers[rank][0])
            if fine:
                results[rank] = value
            elif error is None:
                error = RankFailedError(f"rank {rank} raised\n{value}")
                deadline = min(deadline, time.monotonic() + _CAUSE)
    if error is not None:
        raise error
    return [results[rank] for rank in range(len(workers))]


def _answer(rank: int, pipe: connection.Connection, process: Any) -> tuple[bool, Any]:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join()
        raise RankFailedError(f"rank {rank} died with exit status {process.exitcode}") from None


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
