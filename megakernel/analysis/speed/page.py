"""Pages of numbers: what was measured, or what counting predicts."""

from collections.abc import Iterable, Sequence
from datetime import date
from typing import NamedTuple

import torch

from . import others
from .cases import Case
from .contenders import CONTENDERS
from .cost import Cost, needed
from .machine import Machine, surroundings
from .measuring import Row, Survey, Times
from .passes import Pass, launched
from .suites import Suite
from .targets import Figures, Timed

BFLOAT16 = 2
"""Bytes."""

MOST = 2.2
"""What a doubling of N may cost for what is called linear."""


def measured_page(survey: Survey, device: torch.device, command: str) -> str:
    """Markdown of one run: where, when and how, and a table for each case."""
    suite, machine = survey.suite, survey.machine
    numbers = str(survey.dtype).removeprefix("torch.")
    lines = [
        f"# {suite.title}",
        "",
        f"`{command}`, {date.today().isoformat()}, {machine.name}, {numbers}; {surroundings(device)}.",
        "",
        suite.about,
        "",
        f"Times are medians of up to {survey.repeats} runs after a warm-up. {_TIMED[device.type]} Every contender was "
        "checked first, output and gradients against float64; *error* is the largest RMS ratio. The floor is the "
        f"longer of the least bytes over {machine.bandwidth / 1e9:,.0f} GB/s and of the least FLOPs over "
        f"{machine.peak / 1e12:,.3g} TFLOP/s, {machine.source}. "
        f"The column *times {suite.against}* is this contender's time over that of {suite.against}, forward and "
        "backward.",
        "",
    ]
    if suite.grows:
        lines += [*_growth(survey), ""]
    figures = {
        (row.contender, case): Timed(
            row.times.both, row.times.both * row.times.both_share, row.times.peak.both
        )
        for case, rows in survey.results
        for row in rows
        if row.times is not None
    }
    lines += _targets(suite, figures, "measured")
    previous: dict[str, Times] = {}
    for case, rows in survey.results:
        timed = {row.contender: row.times for row in rows if row.times is not None}
        lines += [f"## {case}", ""]
        if timed:
            lines += [*_table(rows, timed.get(suite.against), survey, previous), ""]
        missing = [f"* {row.contender}: {row.problem}" for row in rows if row.times is None]
        lines += [*missing, ""] if missing else []
        previous = timed
    lines += [f"* {remark}" for remark in survey.remarks]
    return "\n".join(lines).rstrip() + "\n"


_TIMED = {
    "cuda": "The GPU's caches are flushed before each. Peak memory is what torch had given out at most, with inputs, "
    "weights, output and gradients.",
    "cpu": "With one thread they are processor time, without other processes' turns; freed memory stays with the "
    "process, so that large tensors do not cost new pages of the system. Peak memory is by how much the resident "
    "memory of a fresh process grew at most (VmHWM), with inputs, weights, output and gradients.",
}
"""How times and memory were taken on a type of device."""


def _table(
    rows: Sequence[Row], against: Times | None, survey: Survey, previous: dict[str, Times]
) -> list[str]:
    suite = survey.suite
    columns = ["contender", "forward ms", "forward + backward ms", "forward MiB", "forward + backward MiB"]
    columns += ["forward: of the floor", "forward + backward: of the floor"]
    columns += [] if against is None else [f"times {suite.against}"]
    columns += ["time per doubling", "memory per doubling"] if suite.grows else []
    body = []
    for row in rows:
        times = row.times
        if times is None or row.verdict is None:
            continue
        cells = [row.contender, number(times.forward * 1e3), number(times.both * 1e3)]
        cells += [number(size / 2**20) for size in times.peak]
        cells += [f"{times.forward_share:.0%}", f"{times.both_share:.0%}"]
        cells += [] if against is None else [f"{times.both / against.both:.2f}x"]
        cells += _doubling(times, previous.get(row.contender)) if suite.grows else []
        body.append([*cells, f"{row.verdict.error:.1e}"])
    return markdown([*columns, "error"], body)


def _doubling(times: Times, half: Times | None) -> list[str]:
    if half is None:
        return ["", ""]
    return [f"{times.both / half.both:.2f}x", f"{times.peak.both / half.peak.both:.2f}x"]


def _growth(survey: Survey) -> list[str]:
    """What doublings cost at most, and from where on each contender is faster than the one it is compared with."""
    by_name: dict[str, dict[int, Times]] = {}
    for case, rows in survey.results:
        for row in rows:
            if row.times is not None:
                by_name.setdefault(row.contender, {})[case.tokens] = row.times
    against = survey.suite.against
    base = by_name.pop(against, {})
    lines = []
    for name, times in by_name.items():
        doubled = [(n, times[n], times[n // 2]) for n in times if n // 2 in times]
        if doubled:
            longer, at_longer = max((one.both / half.both, n) for n, one, half in doubled)
            larger, at_larger = max((one.peak.both / half.peak.both, n) for n, one, half in doubled)
            verdict = "linear" if max(longer, larger) <= MOST else f"more than {MOST}x"
            lines.append(
                f"* {name}: a doubling of N costs at most {longer:.2f}x in time (to N = {at_longer:,}) and "
                f"{larger:.2f}x in memory (to N = {at_larger:,}): {verdict}."
            )
        slower = max((n for n in times if n in base and times[n].both >= base[n].both), default=0)
        faster = min((n for n in times if n in base and n > slower), default=None)
        if faster is not None:
            lines.append(f"* {name}: faster than {against} from N = {faster:,} on.")
    return lines


def predicted_page(suite: Suite, machine: Machine, command: str) -> str:
    """Markdown of what counting bytes and FLOPs predicts for a machine that was not at hand."""
    lines = [
        f"# {suite.title}: *predicted*",
        "",
        f"`{command}`, {date.today().isoformat()}. **Nothing on this page was measured.** Times are *predicted* for "
        f"{machine.name} in bfloat16 from counted bytes and FLOPs ({machine.source}).",
        "",
        suite.about,
        "",
        "*Least*: every input read once, every output written once, and the operations that the formula needs. "
        "*Launched*: what the launches of our kernels of causal kernel attention and of FLuRKA read, write and "
        "multiply, each as long as the slower of the two; of flash-linear-attention and the eager version what "
        "launches and torch's ops read and write at least, the operations hidden behind it. A dash where nothing is "
        "counted. *Of the floor* is the one over the other.",
        "",
    ]
    columns = [*_PREDICTED, f"floor times {suite.against}, *predicted*"]
    figures: dict[tuple[str, Case], Timed] = {}
    tables = []
    for case in suite.cases:
        body = []
        for name in suite.contenders:
            for backward in (False, True):
                forecast = _forecast(name, case, machine, backward)
                if forecast is None:
                    continue
                body.append(_predicted(name, backward, forecast, suite, case, machine))
                if backward:
                    figures[name, case] = Timed(forecast.seconds or forecast.floor, forecast.floor)
        tables += [f"## {case}", "", *markdown(columns, body), ""]
    lines += _targets(suite, figures, "*predicted*")
    return "\n".join([*lines, *tables]).rstrip() + "\n"


_PREDICTED = (
    "contender",
    "pass",
    "least GB",
    "least GFLOP",
    "floor ms, *predicted*",
    "launched GB",
    "launched GFLOP",
    "launched ms, *predicted*",
    "of the floor, *predicted*",
)


class _Forecast(NamedTuple):
    """What counting says of a contender on a case."""

    least: Cost

    floor: float
    """Seconds that the least takes."""

    passes: list[Pass] | None
    """None where they are not counted."""

    seconds: float | None
    """That the passes take, one after the other."""


def _forecast(name: str, case: Case, machine: Machine, backward: bool) -> _Forecast | None:
    """None for another's implementation that is not installed."""
    contender = CONTENDERS[name]
    if contender.build is None:
        passes = launched(contender.preset, case, BFLOAT16, backward)
    else:
        passes = others.launched(name, case, BFLOAT16, backward)
        if passes is None:
            return None
    least = needed(contender.preset, case, BFLOAT16, backward)
    floor = least.seconds(machine.bandwidth, machine.peak)
    if passes is None:
        return _Forecast(least, floor, None, None)
    seconds = sum(one.cost.seconds(machine.bandwidth, machine.peak) for one in passes)
    return _Forecast(least, floor, passes, seconds)


def _predicted(
    name: str, backward: bool, forecast: _Forecast, suite: Suite, case: Case, machine: Machine
) -> list[str]:
    least, floor, passes, seconds = forecast
    cells = [name, "forward + backward" if backward else "forward", *_counted(least), number(floor * 1e3)]
    if passes is None or seconds is None:
        cells += ["—"] * 4
    else:
        whole = Cost(sum(one.cost.bytes for one in passes), sum(one.cost.flops for one in passes))
        moved, multiplied = _counted(whole)
        cells += [moved, multiplied if whole.flops else "—", number(seconds * 1e3), f"{floor / seconds:.0%}"]
    against = needed(CONTENDERS[suite.against].preset, case, BFLOAT16, backward)
    return [*cells, f"{floor / against.seconds(machine.bandwidth, machine.peak):.2f}x"]


def _targets(suite: Suite, figures: Figures, how: str) -> list[str]:
    """What was set out to reach, and what came of it in the worst case."""
    if not suite.targets:
        return []
    columns = ["target, forward + backward", "set", f"worst case, {how}", "kept"]
    body = [target.cells(figures, suite.cases) for target in suite.targets]
    about = "Times of a contender whose launches are not counted are its floors."
    return ["## Targets", "", *([about, ""] if how != "measured" else []), *markdown(columns, body), ""]


def _counted(cost: Cost) -> list[str]:
    return [number(cost.bytes / 1e9), number(cost.flops / 1e9)]


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table, its numbers to the right."""
    head = [" | ".join(columns), " | ".join(["---", *["---:"] * (len(columns) - 1)])]
    return [f"| {line} |" for line in [*head, *(" | ".join(row) for row in rows)]]


def number(value: float) -> str:
    """Three digits, and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
