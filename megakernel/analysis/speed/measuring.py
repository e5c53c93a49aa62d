"""Measuring a suite: everything checked, then timed, in one run on one device."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from megakernel.config import RunFailed

from . import memory
from .cases import Case
from .check import Verdict, check
from .clock import keeping_freed_memory, median
from .contenders import CONTENDERS, Contender
from .cost import needed
from .machine import Machine, measured
from .subject import draw, subject
from .suites import Suite

PATIENCE = 10.0
"""Seconds after which no further run of one measurement is started."""


class Times(NamedTuple):
    """What a contender took on a case."""

    forward: float
    """Seconds."""

    both: float
    """Seconds, forward and backward."""

    peak: memory.Peak

    forward_share: float
    """The least time that the device needs, over `forward`."""

    both_share: float


@dataclass(frozen=True)
class Row:
    """One contender on one case: its times, or why there are none."""

    contender: str
    verdict: Verdict | None = None
    times: Times | None = None
    problem: str = ""


@dataclass
class Survey:
    """What a suite gave."""

    suite: Suite
    machine: Machine
    dtype: torch.dtype
    repeats: int
    results: list[tuple[Case, list[Row]]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """What ops said about how they run, once each."""


def survey(
    suite: Suite, device: torch.device, repeats: int, progress: Callable[[str], object] = lambda text: None
) -> Survey:
    """Check and measure every contender on every case; `progress` is told what comes next.

    Raises RunFailed where one of ours is wrong.
    """
    if device.type == "cpu":
        with keeping_freed_memory():
            return _survey(suite, device, torch.float32, repeats, progress)
    return _survey(suite, device, torch.bfloat16, repeats, progress)


def _survey(
    suite: Suite, device: torch.device, dtype: torch.dtype, repeats: int, progress: Callable[[str], object]
) -> Survey:
    progress("the device's limits")
    result = Survey(suite, measured(device, dtype), dtype, repeats)
    for case in suite.cases:
        rows = []
        for name in suite.contenders:
            progress(f"{case}: {name}")
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always", RuntimeWarning)
                rows.append(_row(CONTENDERS[name], case, device, result))
            remarks = [str(warning.message) for warning in said]
            result.remarks += [remark for remark in dict.fromkeys(remarks) if remark not in result.remarks]
        result.results.append((case, rows))
    return result


def _row(contender: Contender, case: Case, device: torch.device, result: Survey) -> Row:
    if reason := contender.problem(case, device):
        return Row(contender.name, problem=reason)
    try:
        verdict = check(contender, case, device, result.dtype)
        if verdict.is_right:
            return Row(contender.name, verdict, _times(contender, case, device, result))
    except torch.OutOfMemoryError:
        return Row(contender.name, problem="out of memory")
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if contender.is_ours:
        raise RunFailed(f"{contender.name} is wrong at {case}, so nothing is written; {verdict}")
    return Row(contender.name, verdict, problem=f"wrong: {verdict}")


def _times(contender: Contender, case: Case, device: torch.device, result: Survey) -> Times:
    one = subject(contender, case, draw(case, device, result.dtype))
    if device.type == "cuda":
        peak = memory.on_gpu(one, device)
    else:
        peak = memory.in_own_process(contender.name, case, result.dtype, torch.get_num_threads())
    forward = median(one.infer, device, result.repeats, PATIENCE)
    both = median(one.train, device, result.repeats, PATIENCE)
    machine, element = result.machine, result.dtype.itemsize
    floors = [
        needed(contender.preset, case, element, backward).seconds(machine.bandwidth, machine.peak)
        for backward in (False, True)
    ]
    return Times(forward, both, peak, floors[0] / forward, floors[1] / both)
