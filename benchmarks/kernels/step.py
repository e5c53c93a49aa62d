"""Where a training step's time goes: how long the device works, its longest kernels, and the gaps between them.

    megakernel pretrain CONFIG 'training.profile={start: 10, steps: 2}'
    python -m benchmarks.kernels.step RUN/profile/step_10/rank_0.json.gz

Reads the trace of a profile. A GPU works while any kernel or copy runs; otherwise it waits for the host, or for other
ranks. A trace without a GPU has torch's operations in place of kernels, each without those that it calls. Time is that
of the steps, from the beginning of the first to the end of the last or of its work.
"""

import gzip
import json
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.page import docstring_parser, table, table_row

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace's events that keep the GPU busy."""

LONGEST = 30
"""Kernels that the table shows."""

LONGEST_GAPS = 10

SHORT_GAP = 10.0
"""Microseconds up to which a gap is what lies between any two launches."""

LETTERS = 90
"""Of a kernel's name."""


class Interval(NamedTuple):
    """Something that took time, in microseconds."""

    start: float
    end: float
    name: str


class Gap(NamedTuple):
    """Time in which the device does not work."""

    start: float
    end: float

    before: str
    """The kernel that ended last, empty at the start."""

    after: str
    """The kernel that ends it, empty at the end."""

    host: str
    """The phase of the step on the host when it began, empty outside of all."""


class StepTimes(NamedTuple):
    """What a trace of consecutive steps says about the device."""

    steps: int

    wall: float
    """Microseconds of all steps."""

    busy: float
    """Microseconds of them in which the device works."""

    gaps: list[Gap]
    """In order."""

    spent: dict[str, list[float]]
    """Name of a kernel -> microseconds of each launch."""

    on_gpu: bool

    @property
    def busy_share(self) -> float:
        """Of the steps' time."""
        return self.busy / self.wall


def analyze(
    work: Sequence[Interval],
    steps: Sequence[Interval],
    phases: Sequence[Interval] = (),
    alone: Sequence[Interval] | None = None,
    on_gpu: bool = True,
) -> StepTimes:
    """Busy time, gaps and times by name of at least one interval of work.

    Args:
        work: kernels, or operations of a CPU; they may overlap.
        steps: the steps on the host; without any, all work is one step.
        phases: of the steps on the host, such as forward; the innermost one names a gap.
        alone: intervals whose lengths count by name, if not those of `work`.
        on_gpu: whether they are kernels.
    """
    order = sorted(work)
    start = min([order[0].start, *(x.start for x in steps)])
    end = max([x.end for x in order] + [x.end for x in steps])
    innermost = sorted(phases, key=lambda x: (x.start, -x.end))
    gaps, busy, last, before = [], 0.0, start, ""
    for one in (*order, Interval(end, end, "")):
        if one.start > last:
            gaps.append(Gap(last, one.start, before, one.name, _phase(innermost, last)))
        busy += max(0.0, one.end - max(one.start, last))
        if one.end >= last:
            last, before = one.end, one.name
    spent: dict[str, list[float]] = defaultdict(list)
    for one in work if alone is None else alone:
        spent[one.name].append(one.end - one.start)
    return StepTimes(max(len(steps), 1), end - start, busy, gaps, dict(spent), on_gpu)


def _phase(phases: Sequence[Interval], moment: float) -> str:
    """The last phase to begin of those that contain a moment; phases in order."""
    index = bisect_right(phases, moment, key=lambda phase: phase.start)
    return next((x.name for x in reversed(phases[:index]) if x.end > moment), "")


def without_inner(nested: Sequence[Interval]) -> list[Interval]:
    """Operations of one thread, each as long as it runs without those that it calls, from its own start."""
    own: list[Interval] = []
    open_ones: list[tuple[Interval, float]] = []  # and the time of what they call

    def close(until: float) -> None:
        while open_ones and open_ones[-1][0].end <= until:
            one, inner = open_ones.pop()
            own.append(one._replace(end=one.end - inner))
            if open_ones:
                outer, spent = open_ones[-1]
                open_ones[-1] = outer, spent + one.end - one.start

    for one in sorted(nested, key=lambda x: (x.start, -x.end)):
        close(one.start)
        open_ones.append((one, 0.0))
    close(float("inf"))
    return own


def read_trace(trace: Path) -> StepTimes | None:
    """What a file of `training.profile` says; None if it has neither kernels nor operations."""
    with gzip.open(trace, "rt") as file:
        return of_events(json.load(file)["traceEvents"])


def of_events(listed: Iterable[dict[str, Any]]) -> StepTimes | None:
    """What the events of a Chrome trace say."""
    events = [event for event in listed if event.get("ph") == "X"]

    def intervals(*kinds: str) -> list[Interval]:
        return [_interval(event) for event in events if event["cat"] in kinds]

    notes = intervals("user_annotation")
    steps = [x for x in notes if x.name.startswith("step ")]
    phases = [x for x in notes if not x.name.startswith(("step ", "ProfilerStep"))]
    if work := intervals(*WORK):
        return analyze(work, steps, phases)
    threads: dict[Any, list[Interval]] = defaultdict(list)
    for event in events:
        if event["cat"] == "cpu_op":
            threads[event.get("tid")].append(_interval(event))
    alone = [x for thread in threads.values() for x in without_inner(thread)]
    operations = [x for thread in threads.values() for x in thread]
    return analyze(operations, steps, phases, alone, on_gpu=False) if operations else None


def _interval(event: dict[str, Any]) -> Interval:
    name = event["name"].removeprefix("void ")[:LETTERS]
    return Interval(event["ts"], event["ts"] + event["dur"], name)


def summary(trace: Path) -> list[str]:
    """Lines of a page: busy share, the kernels that take the longest, gaps."""
    times = read_trace(trace)
    return [f"{trace} has neither kernels nor operations."] if times is None else times_lines(times)


def times_lines(times: StepTimes) -> list[str]:
    """Lines of a page."""
    device, what = ("GPU", "kernel") if times.on_gpu else ("CPU", "operation")
    steps = times.steps
    longest = sorted(times.spent.items(), key=lambda item: -sum(item[1]))[:LONGEST]
    rows = (
        table_row(
            [
                f"`{name}`",
                f"{len(each) / steps:g}",
                f"{sum(each) / steps / 1e3:.2f}",
                f"{sum(each) / times.wall:.1%}",
            ]
        )
        for name, each in longest
    )
    return [
        f"{steps} step(s) of {times.wall / steps / 1e3:.1f} ms each; the {device} works {times.busy_share:.0%} of the "
        f"time. {_gaps_line(times)}",
        "",
        *table((what, "launches per step", "ms per step", "share of the time"), rows),
        *_gaps_table(times),
    ]


def _gaps_line(times: StepTimes) -> str:
    """Number and time of gaps, in words."""
    long = [gap.end - gap.start for gap in times.gaps if gap.end - gap.start > SHORT_GAP]
    short = [gap.end - gap.start for gap in times.gaps if gap.end - gap.start <= SHORT_GAP]
    return (
        f"Gaps of more than {SHORT_GAP:.0f} µs: {len(long) / times.steps:g} a step, "
        f"{sum(long) / times.steps / 1e3:.2f} ms; shorter ones: {len(short) / times.steps:g}, "
        f"{sum(short) / times.steps / 1e3:.2f} ms."
    )


def _gaps_table(times: StepTimes) -> list[str]:
    """The longest gaps."""
    longest = sorted(times.gaps, key=lambda gap: gap.start - gap.end)[:LONGEST_GAPS]
    rows = (
        table_row(
            [
                f"{(gap.end - gap.start) / 1e3:.3f}",
                gap.host or "-",
                *(f"`{name}`" if name else "-" for name in (gap.before, gap.after)),
            ]
        )
        for gap in longest
    )
    return table(("gap, ms", "the host is in", "after", "before"), rows)


def main() -> int:
    parser = docstring_parser(__doc__)
    parser.add_argument("trace", type=Path)
    trace = parser.parse_args().trace
    if not trace.is_file():
        print(
            f"step_kernels: {trace} is no file; expected RUN/profile/step_S/rank_R.json.gz", file=sys.stderr
        )
        return 2
    print("\n".join(summary(trace)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
