"""Peak memory of a computation, its inputs, weights, output and gradients included."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cases import Case
from .contenders import CONTENDERS
from .subject import Subject, draw, subject


class Peak(NamedTuple):
    """Bytes at most in use."""

    forward: int
    both: int
    """Forward and backward."""


def on_gpu(one: Subject, device: torch.device) -> Peak:
    """Bytes that torch had given out at most, without what others hold."""
    others = torch.cuda.memory_allocated(device) - sum(x.nbytes for x in (*one.leaves, one.pull))

    def peak(run: Callable[[], Any]) -> int:
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device) - others

    return Peak(peak(one.infer), peak(one.train))


def in_own_process(name: str, case: Case, dtype: torch.dtype, threads: int) -> Peak:
    """By how much a fresh process's resident memory grew at most, from before its inputs were made."""
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=fresh) as pool:
        return pool.submit(_grown, name, case, dtype, threads).result()


def _grown(name: str, case: Case, dtype: torch.dtype, threads: int) -> Peak:
    torch.set_num_threads(threads)
    device, contender = torch.device("cpu"), CONTENDERS[name]
    # Libraries take their own memory when they first run.
    small = Case(1, 16, 1, 16)
    subject(contender, small, draw(small, device, dtype)).train()
    before = _resident()
    drawn: list[Tensor] = draw(case, device, dtype)
    one = subject(contender, case, drawn)
    one.infer()
    forward = _resident() - before
    one.train()
    return Peak(forward, _resident() - before)


def _resident() -> int:
    """Bytes at most resident so far. getrusage's ru_maxrss would count the process that this one was forked from."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kibibytes = next(line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(kibibytes) * 1024
