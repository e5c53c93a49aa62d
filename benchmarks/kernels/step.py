"""Where a training step's time goes on a GPU: how long it works, and its kernels by time.

    megakernel pretrain CONFIG 'training.profile={start: 10, steps: 2}'
    python -m benchmarks.kernels.step RUN/profile/step_10/rank_0.json.gz

Reads the trace of a profile. The GPU works while any kernel or copy runs; otherwise it waits for the host, or for other
ranks.
"""

import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from benchmarks.page import docstring_parser, table, table_row

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace's events that keep the GPU busy."""

LONGEST = 30
"""Kernels that the table shows."""

LETTERS = 90
"""Of a kernel's name."""


def summary(trace: Path) -> list[str]:
    """Lines of a page: share of the time in which the GPU works, and a table of the kernels that take the longest."""
    with gzip.open(trace, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    work = [
        (event["ts"], event["ts"] + event["dur"], event["name"]) for event in events if event["cat"] in WORK
    ]
    if not work:
        return [f"{trace} has no kernels of a GPU."]
    steps = (
        sum(event["cat"] == "user_annotation" and event["name"].startswith("step ") for event in events) or 1
    )
    span = max(end for _, end, _ in work) - min(start for start, _, _ in work)
    spent: dict[str, list[float]] = defaultdict(list)
    for start, end, name in work:
        spent[name.removeprefix("void ")[:LETTERS]].append(end - start)
    busy = _union((start, end) for start, end, _ in work)
    longest = sorted(spent.items(), key=lambda item: -sum(item[1]))[:LONGEST]
    rows = (
        table_row(
            [
                f"`{name}`",
                f"{len(times) / steps:g}",
                f"{sum(times) / steps / 1e3:.2f}",
                f"{sum(times) / span:.1%}",
            ]
        )
        for name, times in longest
    )
    return [
        f"{steps} step(s) of {span / steps / 1e3:.1f} ms each; the GPU works {busy / span:.0%} of the time.",
        "",
        *table(("kernel", "launches per step", "ms per step", "share of the time"), rows),
    ]


def _union(intervals: Iterable[tuple[float, float]]) -> float:
    """Total length of overlapping intervals."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


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
