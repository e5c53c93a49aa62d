"""The page of one measurement: device, date, method and tables."""

from collections.abc import Sequence
from datetime import date

import torch

from benchmarks.page import table, table_row

from .clock import Times
from .machine import environment
from .measuring import CaseResult, SuiteResult
from .suites import Suite
from .targets import Figures

LINEAR_GROWTH = 2.2
"""Growth is called linear if a doubling of N costs at most this factor."""


def measured_page(result: SuiteResult, device: torch.device, command: str) -> str:
    """The page in Markdown: device, date, method, and a table for each case."""
    suite, machine = result.suite, result.machine
    numbers = str(result.dtype).removeprefix("torch.")
    lines = [
        f"# {suite.title}",
        "",
        f"`{command}`, {date.today().isoformat()}, {machine.name}, {numbers}; {environment(device)}.",
        "",
        suite.description,
        "",
        f"Times are medians of up to {result.repeats} runs after a warm-up. {_TIMED[device.type]} Every "
        "implementation was checked first, output and gradients against float64; *error* is the largest RMS "
        "ratio. The floor is the "
        f"larger of two times: the least bytes over {machine.bandwidth / 1e9:,.0f} GB/s and the least FLOPs over "
        f"{machine.peak / 1e12:,.3g} TFLOP/s ({machine.source}). "
        f"The column *times {suite.baseline}* is this implementation's time over that of {suite.baseline}, forward and "
        "backward.",
        "",
    ]
    if suite.doubles_tokens:
        lines += [*_growth(result), ""]
    figures = {
        (row.implementation, case): row.times
        for case, rows in result.results
        for row in rows
        if row.times is not None
    }
    lines += _targets(suite, figures)
    previous: dict[str, Times] = {}
    for case, rows in result.results:
        timed = {row.implementation: row.times for row in rows if row.times is not None}
        lines += [f"## {case}", ""]
        if timed:
            lines += _table(rows, timed.get(suite.baseline), result, previous)
        missing = [f"* {row.implementation}: {row.problem}" for row in rows if row.times is None]
        lines += [*missing, ""] if missing else []
        previous = timed
    lines += [f"* {remark}" for remark in result.remarks]
    return "\n".join(lines).rstrip() + "\n"


_TIMED = {
    "cuda": "The GPU's L2 cache is flushed before each. Peak memory is the most that torch had allocated, with inputs, "
    "weights, output and gradients.",
    "cpu": "With one thread they are CPU time, which excludes other processes; freed memory stays with the process, so "
    "that large tensors do not cost new pages of the system. Peak memory is the largest growth of the resident memory "
    "of a fresh process (VmHWM), with inputs, weights, output and gradients.",
}
"""Type of device -> how times and memory were measured."""


def _table(
    rows: Sequence[CaseResult], baseline: Times | None, result: SuiteResult, previous: dict[str, Times]
) -> list[str]:
    suite = result.suite
    columns = [
        "implementation",
        "forward ms",
        "forward + backward ms",
        "forward MiB",
        "forward + backward MiB",
    ]
    columns += ["forward: of the floor", "forward + backward: of the floor"]
    columns += [] if baseline is None else [f"times {suite.baseline}"]
    columns += ["time per doubling", "memory per doubling"] if suite.doubles_tokens else []
    body = []
    for row in rows:
        times = row.times
        if times is None or row.comparison is None:
            continue
        cells = [row.implementation, number(times.forward * 1e3), number(times.both * 1e3)]
        cells += [number(size / 2**20) for size in times.peak]
        cells += [f"{times.forward_share:.0%}", f"{times.both_share:.0%}"]
        cells += [] if baseline is None else [f"{times.both / baseline.both:.2f}x"]
        cells += _doubling(times, previous.get(row.implementation)) if suite.doubles_tokens else []
        body.append(table_row([*cells, f"{row.comparison.error:.1e}"]))
    return table([*columns, "error"], body, numbers=True)


def _doubling(times: Times, half: Times | None) -> list[str]:
    if half is None:
        return ["", ""]
    return [f"{times.both / half.both:.2f}x", f"{times.peak.both / half.peak.both:.2f}x"]


def _growth(result: SuiteResult) -> list[str]:
    """For each implementation, its largest cost of a doubling and the N from which it is faster than the baseline."""
    by_name: dict[str, dict[int, Times]] = {}
    for case, rows in result.results:
        for row in rows:
            if row.times is not None:
                by_name.setdefault(row.implementation, {})[case.tokens] = row.times
    baseline = result.suite.baseline
    base_times = by_name.pop(baseline, {})
    lines = []
    for name, times in by_name.items():
        doubled = [(n, times[n], times[n // 2]) for n in times if n // 2 in times]
        if doubled:
            longer, at_longer = max((full.both / half.both, n) for n, full, half in doubled)
            larger, at_larger = max((full.peak.both / half.peak.both, n) for n, full, half in doubled)
            comparison = "linear" if max(longer, larger) <= LINEAR_GROWTH else f"more than {LINEAR_GROWTH}x"
            lines.append(
                f"* {name}: a doubling of N costs at most {longer:.2f}x in time (to N = {at_longer:,}) and "
                f"{larger:.2f}x in memory (to N = {at_larger:,}): {comparison}."
            )
        slower = max((n for n in times if n in base_times and times[n].both >= base_times[n].both), default=0)
        faster = min((n for n in times if n in base_times and n > slower), default=None)
        if faster is not None:
            lines.append(f"* {name}: faster than {baseline} from N = {faster:,} on.")
    return lines


def _targets(suite: Suite, figures: Figures) -> list[str]:
    """The table of targets, each with its worst case."""
    if not suite.targets:
        return []
    columns = ["target, forward + backward", "set", "worst case", "met"]
    body = [table_row(target.cells(figures, suite.cases)) for target in suite.targets]
    return ["## Targets", "", *table(columns, body, numbers=True)]


def number(value: float) -> str:
    """A number with three significant digits or, from 100 on, as an integer."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
