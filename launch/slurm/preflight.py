"""Before a run's processes start: is every node fit for them? Started as they will be, one on each device.

`python -m launch.slurm.preflight FOLDER` prints lines of JSON and always ends well, for only nodes side by side can be
judged: the first process of each node says what it finds there, then how long all-reduces take it; the others say
which of those fail them. With `--judge GPUS` it reads such lines and names the nodes that are not fit.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from launch.environment import joined
from launch.exit_status import ExitStatus
from launch.slurm_programs import ask
from megakernel.config.cluster import Cluster
from megakernel.training.environment import package_versions

from .slow_nodes import Timing, slow_nodes, summary

LEAST_MEMORY = 2 << 30
"""Bytes of host memory that a process cannot start without."""

BUSY_SHARE = 0.05
"""A GPU with a larger share of its memory in use before a run starts still serves a process that should have ended."""

SKEW_SECONDS = 60.0
"""Between clocks: collectives give up and logs are read by them. Starting on many nodes takes seconds itself."""


@dataclass(frozen=True)
class NodeReport:
    """The findings of a node about itself."""

    node: str
    time: float
    """Of its clock, in seconds since 1970."""

    memory: int
    """Bytes of host memory that are free."""

    gpus: list[float] | None
    """Of each GPU the share of its memory that is in use; None where no driver can be asked."""

    unwritable: str | None
    """Why the run's folder cannot be written from here."""

    versions: dict[str, str] = field(default_factory=dict)
    """Python and packages."""


_Line = TypeVar("_Line", NodeReport, Timing)


def look(submission: Path, node: str) -> NodeReport:
    """The report of this node. submission: a folder that the node must see, inside the run's folder."""
    return NodeReport(
        node,
        time.time(),
        psutil.virtual_memory().available,
        _gpus(),
        _unwritable(submission, node),
        {"python": platform.python_version(), **package_versions()},
    )


def unfit(reports: Mapping[str, NodeReport | None], gpus_per_node: int) -> dict[str, str]:
    """The nodes that should not be used -> why.

    reports: of every node of the job, None where one said nothing. gpus_per_node: what the run needs of each.
    Where none said anything no node is to blame: the check itself was interrupted, or cannot run.
    """
    present = [report for report in reports.values() if report is not None]
    if not present:
        return {}
    bad = {node: "says nothing" for node, report in reports.items() if report is None}
    versions = Counter(json.dumps(report.versions, sort_keys=True) for report in present)
    usual = json.loads(versions.most_common(1)[0][0])
    clock = sorted(report.time for report in present)[len(present) // 2]
    for report in present:
        reasons = list(_reasons(report, gpus_per_node))
        if abs(report.time - clock) > SKEW_SECONDS:
            reasons.append(f"its clock is {report.time - clock:+.0f} s off")
        reasons += [
            f"{name} is {report.versions.get(name)} and {usual.get(name)} elsewhere"
            for name in sorted({*usual, *report.versions})
            if usual.get(name) != report.versions.get(name)
        ]
        if reasons:
            bad[report.node] = ", ".join(reasons)
    return bad


def _reasons(report: NodeReport, gpus_per_node: int) -> list[str]:
    reasons = []
    if report.unwritable is not None:
        reasons.append(f"the run's folder cannot be written ({report.unwritable})")
    if report.memory < LEAST_MEMORY:
        reasons.append(f"{report.memory / 2**30:.1f} GiB of memory are free")
    if report.gpus is not None and len(report.gpus) < gpus_per_node:
        reasons.append(f"{len(report.gpus)} of {gpus_per_node} GPUs can be seen")
    busy = [share for share in report.gpus or () if share > BUSY_SHARE]
    if busy:
        reasons.append(f"{len(busy)} GPUs are in use ({max(busy):.0%} of their memory)")
    return reasons


def judge(lines: Sequence[str], nodes: Sequence[str], gpus_per_node: int, seconds: float) -> dict[str, str]:
    """The nodes that should not be used -> why, by the lines that `main` has printed on all of them.

    seconds: what an all-reduce may take.
    """
    bad = unfit(read_reports(lines, nodes), gpus_per_node)
    return bad | slow_nodes(read_timings(lines), seconds, known=bad)


def read_reports(lines: Iterable[str], nodes: Sequence[str]) -> dict[str, NodeReport | None]:
    """The report of every node, None of those that have none among the lines."""
    reports: dict[str, NodeReport | None] = dict.fromkeys(nodes)
    for report in _read(NodeReport, lines):
        reports[report.node] = report
    return reports


def read_timings(lines: Iterable[str]) -> list[Timing]:
    """The timings of the all-reduces."""
    return list(_read(Timing, lines))


def _read(kind: type[_Line], lines: Iterable[str]) -> Iterator[_Line]:
    for line in lines:
        try:
            yield kind(**json.loads(line))
        except (ValueError, TypeError):
            continue  # of the other kind, or what a node's profile prints


def _gpus() -> list[float] | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    pairs = [line.split(",") for line in done.stdout.splitlines() if line.strip()]
    return [round(float(used) / float(total), 3) for used, total in pairs]


def _unwritable(submission: Path, node: str) -> str | None:
    probe = submission / f".preflight-{node}-{os.getpid()}"
    try:
        with probe.open("w") as file:
            file.write(node)
            file.flush()
            os.fsync(file.fileno())
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None


def main() -> int:
    """Exit status: 1 where nodes were judged and one is not fit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="that every node must see and may write to")
    parser.add_argument(
        "--mib", type=int, default=0, help="size of the all-reduces that are timed; 0 times none"
    )
    parser.add_argument(
        "--judge", type=int, metavar="GPUS", help="of each node; reports come from standard input"
    )
    args = parser.parse_args()
    if args.judge is None:
        _look_and_measure(args.folder, os.environ["SLURMD_NODENAME"], args.mib)
        return ExitStatus.DONE
    nodes = ask("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
    lines = sys.stdin.read().splitlines()
    bad = judge(lines, nodes, args.judge, Cluster().preflight_seconds)
    for line in summary(read_timings(lines)):
        print(line)
    for node in nodes:
        print(f"{node} {f'is not fit: {bad[node]}' if node in bad else 'is fit'}")
    return ExitStatus.FAILED if bad else ExitStatus.DONE


def _look_and_measure(folder: Path, node: str, mib: int) -> None:
    place = joined()
    if place is None or place.local_rank == 0:
        print(json.dumps(asdict(look(folder, node))), flush=True)
    if mib and place is not None and place.world_size > 1:
        from .collectives import time_collectives  # torch takes its time to import

        for timing in time_collectives(place, node, mib):
            # An all-reduce ends for all when it ends for the slowest: one process tells how long it took.
            if place.local_rank == 0 or timing.error is not None:
                print(json.dumps(asdict(timing)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
