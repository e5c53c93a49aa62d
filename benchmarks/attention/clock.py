"""Times of a computation on its device, without what the caches held before and the start of the first run."""

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

WARM_UP = 2
"""Runs that are not counted: kernels are compiled and memory is taken in the first."""

FLUSHED = 2**28
"""Bytes written before each run on a GPU, more than its L2 holds: inputs come from memory, as they do in a model."""

Run = Callable[[], Any]


class Peak(NamedTuple):
    """Bytes at most in use."""

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
    """The least time that the device needs, over `forward`."""

    both_share: float


_MALLOC = {-1: (2**31 - 1, 2**17), -2: (2**28, 0), -4: (0, 2**16)}
"""glibc's M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_MAX: values to keep what is freed, and those it begins with."""


@contextmanager
def keeping_freed_memory(device: torch.device) -> Iterator[None]:
    """Let this process keep what it frees on a CPU, as a GPU's allocator does, where its libc can.

    Otherwise a run pays for new pages of the system where its tensors are large, and not where they are small: what
    a doubling of the length costs would then say more about malloc than about the computation.
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
        for option, (_, usual) in _MALLOC.items():
            libc.mallopt(option, usual)
        libc.malloc_trim(0)


def median(run: Run, device: torch.device, repeats: int, patience: float) -> float:
    """Median seconds of up to `repeats` runs, fewer once they took `patience` seconds together."""
    return statistics.median(_times(run, device, repeats, patience))


def fastest(run: Run, device: torch.device, repeats: int = 10) -> float:
    """Seconds of the fastest run."""
    return min(_times(run, device, repeats, patience=10.0))


def _times(run: Run, device: torch.device, repeats: int, patience: float) -> list[float]:
    once = _on_gpu(device) if device.type == "cuda" else _on_cpu
    spent = 0.0
    for _ in range(WARM_UP):
        spent += once(run)
        if spent > patience:
            break
    times: list[float] = []
    while not times or (len(times) < repeats and sum(times) < patience):
        times.append(once(run))
    return times


def _on_cpu(run: Run) -> float:
    # One thread's processor time is what it would take alone: other processes' turns are left out.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    run()
    return clock() - start


def _on_gpu(device: torch.device) -> Callable[[Run], float]:
    flushed = torch.empty(FLUSHED, dtype=torch.uint8, device=device)

    def once(run: Run) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return once
