"""What the processes of a small real run ask of the file system, by strace: libraries, code, data and the run's folder.

    python -m benchmarks.scaling_processes [--stage FOLDER]

Trains a small model on four processes of this machine, a first time and again with twice as many saves, under strace
(apt-get install strace), and prints what rank 0 and another rank do. Each rank of a large job does what these do. With
--stage the processes start from a copy of the environment and the code below FOLDER, as those of a job with `stage`.
Counted are system calls: opened files, and questions (stat, readlink, access, and files that are not there).
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.page import docstring_parser, page_header, table, table_row
from launch.shipped import REPOSITORY
from launch.slurm.submission import write_snapshot

RANKS, STEPS = 4, 4

CONFIG = """
run: {name: NAME}
model:
  {num_layers: 2, hidden_size: 32, num_heads: 2, attention: {preset: flurka, compression: {block_size: 16, rank: 4}}}
parallel: {zero_stage: 1}
training:
  {steps: 4, seq_len: 64, global_batch_size: 4, micro_batch_size: 1, dtype: float32, log_every: 1, eval_samples: 4}
schedule: {name: constant, warmup_steps: 2}
checkpoint: {every: EVERY, keep: 1}
data: {train: corpus}
"""

_CALL = re.compile(r"(?P<call>\w+)\((?P<arguments>.*)\)\s+= (?P<result>-?\w+)")
_WRITES = ("mkdir", "rename", "unlink", "rmdir", "link", "chmod", "utimensat")


class Process:
    """The calls of one process and its threads, by group of files: opened, questions, changes, bytes read."""

    def __init__(self, traces: list[Path], groups: dict[str, str]):
        """groups: beginning of a path -> group, the first that fits; others are the system's."""
        self.counts: Counter[tuple[str, str]] = Counter()
        self._groups = groups
        for trace in traces:
            self._read(trace)

    def _read(self, trace: Path) -> None:
        handles: dict[str, str] = {}  # threads share those of their process, but read what they have opened
        with trace.open(errors="replace") as lines:
            for found in filter(None, map(_CALL.match, lines)):
                call, arguments, result = found["call"], found["arguments"], found["result"]
                if call in ("read", "pread64"):
                    group = handles.get(arguments.partition(",")[0])
                    if group is not None and not result.startswith("-"):
                        self.counts[group, "bytes read"] += int(result)
                    continue
                named = re.search(r'"([^"]+)"', arguments)
                if named is None:
                    continue
                group = self._group(named[1])
                if call in ("open", "openat") and not result.startswith("-"):
                    handles[result] = group
                    self.counts[group, "opened"] += 1
                elif call.startswith(_WRITES):
                    self.counts[group, "changes"] += 1
                else:
                    self.counts[group, "questions"] += 1

    def _group(self, path: str) -> str:
        return next((group for start, group in self._groups.items() if path.startswith(start)), "system")


def traced_run(folder: Path, name: str, every: int, python: Path, code: Path) -> list[Process]:
    """Train under strace; returns the processes of the ranks, rank 0 first."""
    (folder / f"{name}.yaml").write_text(CONFIG.replace("NAME", name).replace("EVERY", str(every)))
    traces = folder / f"trace-{name}"
    traces.mkdir()
    watched = "trace=%file,read,pread64,clone,clone3,fork,vfork"
    command = ["strace", "-f", "-ff", "--seccomp-bpf", "-s", "400", "-e", watched, "-o", str(traces / "of")]
    command += [str(python), "-m", "launch.cli", "pretrain", f"{name}.yaml", "--nproc", str(RANKS)]
    variables = {"PYTHONPATH": str(code), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=folder, env={**os.environ, **variables}, check=True, capture_output=True)
    groups = {
        str(folder / "runs"): "run",
        "runs/": "run",
        str(folder / "corpus"): "corpus",
        "corpus": "corpus",
        str(code): "code" if code.parent == folder else "staged",
        str(python.parent.parent): "packages" if str(python.parent.parent) == sys.prefix else "staged",
        str(code.parent / "base"): "staged",  # of a copy of the environment
        sys.prefix: "packages",
        sys.base_prefix: "packages",
        str(REPOSITORY): "packages",
    }
    return [Process(files, groups) for files in _ranks(traces)]


def _ranks(traces: Path) -> Iterator[list[Path]]:
    """The traces of each rank, with those of its threads and loader workers, in the order of ranks."""
    children: dict[str, list[str]] = {}
    ranks = []
    for trace in sorted(traces.glob("of.*"), key=lambda trace: int(trace.suffix[1:])):
        text = trace.read_text(errors="replace")
        children[trace.suffix[1:]] = re.findall(r"(?:clone3?|v?fork)\(.*\)\s+= (\d+)", text)
        started = re.search(r"^execve\(.*", text)
        if started is not None and '"launch.cli"' in started[0] and "--nproc" not in started[0]:
            ranks.append(trace.suffix[1:])
    assert len(ranks) == RANKS, ranks
    for rank in ranks:
        found, waiting = [], [rank]
        while waiting:
            found.append(waiting.pop())
            waiting += children.get(found[-1], [])
        yield [trace for one in found if (trace := traces / f"of.{one}").exists()]


def rows(folder: Path, python: Path, code: Path) -> Iterator[tuple[str, float, float]]:
    """Name and counts of rank 0 and another rank."""
    prepare = [
        "prepare",
        "--source",
        "stdlib",
        "--tokenizer",
        "byte",
        "--out",
        "corpus",
        "--max-documents",
        "60",
    ]
    run = {"cwd": folder, "check": True, "capture_output": True}
    subprocess.run([sys.executable, "-m", "launch.cli", *prepare, "--validation-fraction", "0.1"], **run)  # type: ignore[call-overload]
    first = traced_run(folder, "first", STEPS, python, code)
    second = traced_run(folder, "second", STEPS, python, code)
    saves = traced_run(folder, "saves", 1, python, code)

    def counted(name: str, of: list[Process], group: str, kind: str) -> tuple[str, float, float]:
        return name, of[0].counts[group, kind], of[1].counts[group, kind]

    for group in ("packages", "code", "staged", "system"):
        for kind in ("opened", "questions", "bytes read"):
            yield counted(f"{group}: {kind}", second, group, kind)
    yield counted("code, first start: files written and folders made", first, "code", "changes")
    for group in ("corpus", "run"):
        for kind in ("opened", "questions", "changes"):
            yield counted(f"{group}, of a start with one save: {kind}", second, group, kind)
    for kind in ("opened", "questions", "changes"):
        name, *most = counted(f"run, for each save more: {kind}", saves, "run", kind)
        _, *least = counted("", second, "run", kind)
        zero, other = ((more - less) / (STEPS - 1) for more, less in zip(most, least))
        yield name, zero, other


def main() -> None:
    """Print a table."""
    parser = docstring_parser(__doc__)
    parser.add_argument(
        "--stage", type=Path, metavar="FOLDER", help="start from a copy of the environment there"
    )
    args = parser.parse_args()
    if shutil.which("strace") is None:
        raise SystemExit("strace is missing; apt-get install strace")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        python, code = Path(sys.executable), write_snapshot(folder / "code")
        if args.stage is not None:
            from launch.slurm import staging

            staged = args.stage.absolute() / f"megakernel-{os.getpid()}"
            print(staging.pack(folder), staging.unpack(folder, staged), sep="\n", file=sys.stderr)
            python, code = staged / "environment/bin/python", staged / "code"
        found = [
            table_row([name, *(f"{count:,.0f}" for count in counts)])
            for name, *counts in rows(folder, python, code)
        ]
        if args.stage is not None:
            shutil.rmtree(staged)
    command = "python -m benchmarks.scaling_processes" + (" --stage FOLDER" if args.stage else "")
    head = page_header("Files of the processes of a run", command)
    print("\n".join([*head, *table([f"of {RANKS} processes", "rank 0", "rank 1"], found)]))


if __name__ == "__main__":
    main()
