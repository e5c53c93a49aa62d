"""Run a suite on one device: check every implementation, then time it."""

import multiprocessing
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megakernel.config import RunFailed

from .cases import Case, lower_bound
from .check import LargestError, check
from .clock import Peak, Times, keep_freed_memory, median
from .computation import Computation, computation, random_tensors
from .implementations import IMPLEMENTATIONS, Implementation
from .machine import Machine, measure_limits
from .suites import Suite

PATIENCE = 10.0
"""Seconds after which a measurement starts no further run."""


@dataclass(frozen=True)
class CaseResult:
    """One implementation in one case: its times, or why there are none."""

    implementation: str
    comparison: LargestError | None = None
    times: Times | None = None
    problem: str = ""

    def __str__(self) -> str:
        """Its times in one line, or why there are none."""
        if self.times is None:
            return f"{self.implementation}: {self.problem}"
        forward, both = (1e3 * seconds for seconds in self.times[:2])
        return f"{self.implementation}: {forward:.3f} ms forward, {both:.3f} ms with backward"


@dataclass
class SuiteResult:
    """The results of a suite."""

    suite: Suite
    machine: Machine
    dtype: torch.dtype
    repeats: int
    results: list[tuple[Case, list[CaseResult]]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Runtime warnings of the ops, each once."""


def run_suite(
    suite: Suite,
    device: torch.device,
    repeats: int,
    progress: Callable[[str], object] = lambda text: None,
    save: Callable[["SuiteResult"], object] = lambda result: None,
) -> SuiteResult:
    """Check and measure every implementation in every case.

    progress: called with each one's times, and the case. save: called with all results so far, after each one.

    Raises RunFailed if one of ours is wrong.
    """
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with keep_freed_memory(device):
        progress("the device's limits")
        result = SuiteResult(suite, measure_limits(device, dtype), dtype, repeats)
        for case in suite.cases:
            rows: list[CaseResult] = []
            result.results.append((case, rows))
            for name in suite.implementations:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always", RuntimeWarning)
                    rows.append(_row(IMPLEMENTATIONS[name], case, device, result))
                remarks = [*result.remarks, *(str(warning.message) for warning in caught)]
                result.remarks = list(dict.fromkeys(remarks))
                progress(f"{case}: {rows[-1]}")
                save(result)
    return result


def _row(implementation: Implementation, case: Case, device: torch.device, result: SuiteResult) -> CaseResult:
    if reason := implementation.problem(case, device):
        return CaseResult(implementation.name, problem=reason)
    try:
        comparison = check(implementation, case, device, result.dtype)
        if comparison.is_right:
            return CaseResult(implementation.name, comparison, _times(implementation, case, device, result))
    except torch.OutOfMemoryError:
        return CaseResult(implementation.name, problem="out of memory")
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if implementation.is_ours:
        raise RunFailed(f"{implementation.name} is wrong at {case}, so nothing is written; {comparison}")
    return CaseResult(implementation.name, comparison, problem=f"wrong: {comparison}")


def _times(implementation: Implementation, case: Case, device: torch.device, result: SuiteResult) -> Times:
    computed = computation(implementation, case, random_tensors(case, device, result.dtype))
    if device.type == "cuda":
        peak = _gpu_peak(computed, device)
    else:
        # A fresh process, whose resident memory has nothing else.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            threads = torch.get_num_threads()
            peak = pool.submit(_peak_growth, implementation.name, case, result.dtype, threads).result()
    forward = median(computed.infer, device, result.repeats, PATIENCE)
    both = median(computed.train, device, result.repeats, PATIENCE)
    machine, element = result.machine, result.dtype.itemsize
    bounds = [
        lower_bound(implementation.preset, case, element, backward).seconds(machine.bandwidth, machine.peak)
        for backward in (False, True)
    ]
    return Times(forward, both, peak, bounds[0] / forward, bounds[1] / both)


def _gpu_peak(computed: Computation, device: torch.device) -> Peak:
    """Peak bytes allocated by torch, without tensors that do not belong to the computation."""
    tensors = (*computed.leaves, computed.grad_output)
    others = torch.cuda.memory_allocated(device) - sum(x.nbytes for x in tensors)

    def peak(run: Callable[[], Any]) -> int:
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device) - others

    return Peak(peak(computed.infer), peak(computed.train))


def _peak_growth(name: str, case: Case, dtype: torch.dtype, threads: int) -> Peak:
    """Peak growth of this process's resident memory, from before its inputs are made."""
    torch.set_num_threads(threads)
    device, implementation = torch.device("cpu"), IMPLEMENTATIONS[name]
    # A small run first: libraries allocate their own memory when they are first used.
    small = Case(1, 16, 1, 16, rank=4 if case.is_layer else None)
    computation(implementation, small, random_tensors(small, device, dtype)).train()
    before = _peak_resident()
    computed = computation(implementation, case, random_tensors(case, device, dtype))
    computed.infer()
    forward = _peak_resident() - before
    computed.train()
    return Peak(forward, _peak_resident() - before)


def _peak_resident() -> int:
    """Peak resident bytes so far. getrusage's ru_maxrss would include the parent process's peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kibibytes = next(line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(kibibytes) * 1024
