"""Times of a computation on its device, after a warm-up and with the GPU's L2 cache flushed."""

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

WARM_UP = 2
"""Runs that are not counted: the first one compiles kernels and allocates memory."""

FLUSH_BYTES = 2**28
"""Bytes written before each run on a GPU, more than its L2: inputs come from memory, as in a model."""

FLUSHES = 64
"""How often they are written, some 4 ms on an H200: the host then launches the whole run before the GPU starts it, as
in a model whose layers keep the GPU busy."""

Run = Callable[[], Any]


class Peak(NamedTuple):
    """Peak bytes in use."""

    forward: int
    both: int
    """Forward and backward."""


class Times(NamedTuple):
    """Times and memory of an implementation on a case."""

    forward: float
    """Seconds."""

    both: float
    """Seconds, forward and backward."""

    peak: Peak

    forward_share: float
    """The lower bound of the time (`cases.lower_bound`) over `forward`."""

    both_share: float
    """The same of `both`."""


_MALLOC = {-1: (2**31 - 1, 2**17), -2: (2**28, 0), -4: (0, 2**16)}
"""glibc's M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_MAX -> value that keeps freed memory, and glibc's default."""


@contextmanager
def keep_freed_memory(device: torch.device) -> Iterator[None]:
    """Keep freed memory in this process on a CPU, as a GPU's allocator does, if libc can.

    Otherwise large tensors would cost new pages from the system and small ones would not: the cost of a doubling of
    the length would say more about malloc than about the computation.
    """
    libc = ctypes.CDLL(None) if device.type == "cpu" and sys.platform.startswith("linux") else None
    if libc is None or not hasattr(libc, "mallopt"):
        yield
        return
    for option, (kept, _) in _MALLOC.items():
        libc.mallopt(option, kept)
    try:
        yield
    finally:
        for option, (_, default) in _MALLOC.items():
            libc.mallopt(option, default)
        libc.malloc_trim(0)


def median(run: Run, device: torch.device, repeats: int, patience: float) -> float:
    """Median seconds of up to `repeats` runs; no further one starts after `patience` seconds in total."""
    return statistics.median(_times(run, device, repeats, patience))


def fastest(run: Run, device: torch.device, repeats: int = 10) -> float:
    """Seconds of the fastest run."""
    return min(_times(run, device, repeats, patience=10.0))


def _times(run: Run, device: torch.device, repeats: int, patience: float) -> list[float]:
    time_run = _gpu_timer(device) if device.type == "cuda" else _time_on_cpu
    spent = 0.0
    for _ in range(WARM_UP):
        spent += time_run(run)
        if spent > patience:
            break
    times: list[float] = []
    while not times or (len(times) < repeats and sum(times) < patience):
        times.append(time_run(run))
    return times


def _time_on_cpu(run: Run) -> float:
    # CPU time of a single thread excludes the time that other processes run.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    run()
    return clock() - start


def _gpu_timer(device: torch.device) -> Callable[[Run], float]:
    flush_buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def time_run(run: Run) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(FLUSHES):
            flush_buffer.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return time_run
