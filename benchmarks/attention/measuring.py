"""Measuring a suite: everything checked, then timed, in one run on one device."""

import multiprocessing
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megakernel.config import RunFailed

from .cases import Case, needed
from .check import Comparison, check
from .clock import Peak, Times, keeping_freed_memory, median
from .computation import Computation, computation, draw
from .implementations import IMPLEMENTATIONS, Implementation
from .machine import Machine, measured
from .suites import Suite

PATIENCE = 10.0
"""Seconds after which no further run of one measurement is started."""


@dataclass(frozen=True)
class Row:
    """One implementation on one case: its times, or why there are none."""

    implementation: str
    comparison: Comparison | None = None
    times: Times | None = None
    problem: str = ""


@dataclass
class Survey:
    """The results of a suite."""

    suite: Suite
    machine: Machine
    dtype: torch.dtype
    repeats: int
    results: list[tuple[Case, list[Row]]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Warnings of the ops about how they run, once each."""


def survey(
    suite: Suite, device: torch.device, repeats: int, progress: Callable[[str], object] = lambda text: None
) -> Survey:
    """Check and measure every implementation on every case; `progress` is told what comes next.

    Raises RunFailed where one of ours is wrong.
    """
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with keeping_freed_memory(device):
        progress("the device's limits")
        result = Survey(suite, measured(device, dtype), dtype, repeats)
        for case in suite.cases:
            rows = []
            for name in suite.implementations:
                progress(f"{case}: {name}")
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always", RuntimeWarning)
                    rows.append(_row(IMPLEMENTATIONS[name], case, device, result))
                remarks = [*result.remarks, *(str(warning.message) for warning in said)]
                result.remarks = list(dict.fromkeys(remarks))
            result.results.append((case, rows))
    return result


def _row(implementation: Implementation, case: Case, device: torch.device, result: Survey) -> Row:
    if reason := implementation.problem(case, device):
        return Row(implementation.name, problem=reason)
    try:
        comparison = check(implementation, case, device, result.dtype)
        if comparison.is_right:
            return Row(implementation.name, comparison, _times(implementation, case, device, result))
    except torch.OutOfMemoryError:
        return Row(implementation.name, problem="out of memory")
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if implementation.is_ours:
        raise RunFailed(f"{implementation.name} is wrong at {case}, so nothing is written; {comparison}")
    return Row(implementation.name, comparison, problem=f"wrong: {comparison}")


def _times(implementation: Implementation, case: Case, device: torch.device, result: Survey) -> Times:
    one = computation(implementation, case, draw(case, device, result.dtype))
    if device.type == "cuda":
        peak = _on_gpu(one, device)
    else:
        # In a fresh process, which holds nothing else.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            threads = torch.get_num_threads()
            peak = pool.submit(_grown, implementation.name, case, result.dtype, threads).result()
    forward = median(one.infer, device, result.repeats, PATIENCE)
    both = median(one.train, device, result.repeats, PATIENCE)
    machine, element = result.machine, result.dtype.itemsize
    floors = [
        needed(implementation.preset, case, element, backward).seconds(machine.bandwidth, machine.peak)
        for backward in (False, True)
    ]
    return Times(forward, both, peak, floors[0] / forward, floors[1] / both)


def _on_gpu(one: Computation, device: torch.device) -> Peak:
    """Bytes that torch had given out at most, without what others hold."""
    others = torch.cuda.memory_allocated(device) - sum(x.nbytes for x in (*one.leaves, one.grad_output))

    def peak(run: Callable[[], Any]) -> int:
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device) - others

    return Peak(peak(one.infer), peak(one.train))


def _grown(name: str, case: Case, dtype: torch.dtype, threads: int) -> Peak:
    """By how much the resident memory of this process grows at most, from before its inputs are made."""
    torch.set_num_threads(threads)
    device, implementation = torch.device("cpu"), IMPLEMENTATIONS[name]
    # Libraries take their own memory when they first run.
    small = Case(1, 16, 1, 16, rank=4 if case.is_layer else None)
    computation(implementation, small, draw(small, device, dtype)).train()
    before = _resident()
    one = computation(implementation, case, draw(case, device, dtype))
    one.infer()
    forward = _resident() - before
    one.train()
    return Peak(forward, _resident() - before)


def _resident() -> int:
    """Bytes at most resident so far. getrusage's ru_maxrss would count the process that this one was forked from."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kibibytes = next(line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(kibibytes) * 1024
