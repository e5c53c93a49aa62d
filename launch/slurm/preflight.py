"""Checks that every node is fit for a run, with the same processes as the run: one per device.

`python -m launch.slurm.preflight FOLDER` prints JSON lines and always succeeds, since a node can only be judged next
to others: the first process of each node prints its node's report and the timings of its all-reduces, the others only
the all-reduces that fail. With `--judge GPUS` it reads such lines and names the unfit nodes.
"""

import argparse
import json
import os
import platform
import re
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

from launch.environment import launched_process
from launch.exit_status import ExitStatus
from launch.slurm_programs import check_output
from megakernel.config.cluster import Cluster
from megakernel.training.environment import package_versions

from .slow_nodes import Timing, slow_nodes, summary

MIN_FREE_MEMORY = 2 << 30
"""Bytes of free host memory below which a node is unfit."""

BUSY_SHARE = 0.05
"""A GPU with more than this share of its memory in use still serves a process that should have ended."""

MAX_CLOCK_SKEW = 60.0
"""Seconds from the median clock. Timeouts and logs depend on clocks; starting on many nodes itself takes seconds."""


@dataclass(frozen=True)
class NodeReport:
    """What a node reports about itself."""

    node: str
    time: float
    """Unix time by its clock."""

    memory: int
    """Bytes of host memory that are free."""

    gpus: list[float] | None
    """Share of memory in use of each GPU that the job may use; None without nvidia-smi."""

    unwritable: str | None
    """Why the run's folder cannot be written from here; None if it can."""

    versions: dict[str, str] = field(default_factory=dict)
    """Versions of Python and packages."""

    tasks: int = 1
    """Tasks of the node if each sees one GPU alone, and so this report too; otherwise 1."""


_Line = TypeVar("_Line", NodeReport, Timing)


def node_report(submission: Path, node: str, tasks: int = 1) -> NodeReport:
    """The report of this node, by one of its tasks.

    submission: a folder inside the run's folder, which the node must be able to write.
    """
    sees_one = re.fullmatch(r"[^,]+", os.environ.get("CUDA_VISIBLE_DEVICES", "")) is not None
    return NodeReport(
        node,
        time.time(),
        psutil.virtual_memory().available,
        _gpus(),
        _unwritable(submission, node),
        {"python": platform.python_version(), **package_versions()},
        tasks if sees_one else 1,
    )


def unfit_by_report(reports: Mapping[str, NodeReport | None], gpus_per_node: int) -> dict[str, str]:
    """Unfit nodes -> why.

    reports: by node, None for a node that sent none. gpus_per_node: GPUs that the run needs on each node.
    Empty if no node sent a report: then the check itself was interrupted, or cannot run.
    """
    present = [report for report in reports.values() if report is not None]
    if not present:
        return {}
    bad = {node: "sent no report" for node, report in reports.items() if report is None}
    versions = Counter(json.dumps(report.versions, sort_keys=True) for report in present)
    usual = json.loads(versions.most_common(1)[0][0])
    clock = sorted(report.time for report in present)[len(present) // 2]
    for report in present:
        reasons = list(_reasons(report, gpus_per_node))
        if abs(report.time - clock) > MAX_CLOCK_SKEW:
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
    if report.memory < MIN_FREE_MEMORY:
        reasons.append(f"{report.memory / 2**30:.1f} GiB of memory are free")
    gpus = -(-gpus_per_node // report.tasks)
    if report.gpus is not None and len(report.gpus) < gpus:
        reasons.append(f"{len(report.gpus)} of {gpus} GPUs can be seen")
    busy = [share for share in report.gpus or () if share > BUSY_SHARE]
    if busy:
        reasons.append(f"{len(busy)} GPUs are in use ({max(busy):.0%} of their memory)")
    return reasons


def unfit_nodes(
    lines: Sequence[str], nodes: Sequence[str], gpus_per_node: int, seconds: float
) -> dict[str, str]:
    """Unfit nodes -> why, from the lines that `main` printed on all nodes. seconds: limit of an all-reduce."""
    bad = unfit_by_report(read_reports(lines, nodes), gpus_per_node)
    # A node that is unfit by its report may also fail in an all-reduce, for that reason.
    return slow_nodes(read_timings(lines), seconds, already_unfit=bad) | bad


def read_reports(lines: Iterable[str], nodes: Sequence[str]) -> dict[str, NodeReport | None]:
    """Node -> its report, None if the lines have none."""
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
            continue  # a line of the other kind, or output of a node's shell profile


def _gpus() -> list[float] | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]
    # Where Slurm does not constrain devices, nvidia-smi also shows those of other jobs. It cannot select MIG devices.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if re.fullmatch(r"(\d+|GPU-[\w-]+)(,(\d+|GPU-[\w-]+))*", visible):
        query.append(f"--id={visible}")
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [_used_share(line) for line in done.stdout.splitlines() if line.strip()]


def _used_share(line: str) -> float:
    try:
        used, total = map(float, line.split(","))
        return round(used / total, 3)
    except (ValueError, ZeroDivisionError):
        return 0.0  # `[N/A]`, as of GPUs that are partitioned or share the host's memory


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
    """Returns 1 if nodes were judged and one is unfit, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a shared folder that every node can write to")
    parser.add_argument("--mib", type=int, default=0, help="MiB of the timed all-reduces; 0 for none")
    parser.add_argument(
        "--judge", type=int, metavar="GPUS", help="GPUs of each node; reads reports from stdin"
    )
    args = parser.parse_args()
    if args.judge is None:
        _print_report_and_timings(args.folder, os.environ["SLURMD_NODENAME"], args.mib)
        return ExitStatus.DONE
    nodes = check_output("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
    lines = sys.stdin.read().splitlines()
    bad = unfit_nodes(lines, nodes, args.judge, Cluster().preflight_seconds)
    for line in summary(read_timings(lines)):
        print(line)
    for node in nodes:
        print(f"{node} {f'is not fit: {bad[node]}' if node in bad else 'is fit'}")
    return ExitStatus.FAILED if bad else ExitStatus.DONE


def _print_report_and_timings(folder: Path, node: str, mib: int) -> None:
    process = launched_process()
    if process is None or process.local_rank == 0:
        tasks = 1 if process is None else process.local_world_size
        print(json.dumps(asdict(node_report(folder, node, tasks))), flush=True)
    if mib and process is not None and process.world_size > 1:
        from .collectives import time_collectives  # imports torch, which is slow

        for timing in time_collectives(process, node, mib):
            # An all-reduce ends at the same time for all its processes: one per node reports how long it took.
            if process.local_rank == 0 or timing.error is not None:
                print(json.dumps(asdict(timing)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
