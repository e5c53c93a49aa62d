"""Registers, spills and shared memory of every kernel, compiled for GPUs that need not be there.

    python -m benchmarks.kernel_resources             writes benchmarks/results/kernel_resources.md
    python -m benchmarks.kernel_resources --check     fails where that table differs or a kernel takes too much

A case (`kernel_cases`) is a call of an op, forward and backward; its launches are noted down and compiled. A launch
that compiles to what one before it did is not repeated. The column `source` is a fingerprint of all that decides what a
launch compiles to: a row whose fingerprint is in the table is taken from there, and compiled again with --fresh, or
as one of the few that `--check --sample 8` draws.
"""

import os
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

from benchmarks.page import table, table_row, whole_help

TABLE = Path(__file__).parent / "results" / "kernel_resources.md"
CAPABILITIES = (80, 90, 100, 120)
HEADER = ("case", "kernel", "GPU", "warps", "registers", "spilled bytes", "shared bytes", "source")

Row = tuple[str, ...]
"""The cells of HEADER."""

Task = tuple[str, int, int, str]
"""Case, index of the launch, capability, fingerprint."""


def cases() -> dict:
    """The cases; imported late, for triton must not find TRITON_INTERPRET."""
    from benchmarks.kernel_cases import CASES

    return CASES


def row_of(task: Task) -> Row:
    """The table's row of one launch of a case for one GPU, compiled."""
    case, index, capability, source = task
    from benchmarks.kernel_compiling import compile_launch

    launch = launches_of(case, capability)[index]
    found = compile_launch(launch, capability)
    numbers = (launch.warps, found.registers, found.spilled, found.shared)
    return (case, launch.kernel.__name__, f"sm_{capability}", *map(str, numbers), source)


@lru_cache(maxsize=1)  # a process compiles the launches of a case one after another
def launches_of(case: str, capability: int) -> list:
    """The launches of a case on a GPU; none where the op refuses its kernels there."""
    from megakernel.ops.kernels.launch import noting

    with noting(capability) as launches:
        try:
            cases()[case]()
        except ValueError as refused:
            print(f"{case} on sm_{capability}: {refused}", file=sys.stderr)
    return launches


def tasks(names: list[str]) -> Iterator[Task]:
    """One for each launch and GPU."""
    from benchmarks.kernel_compiling import fingerprint

    seen = set()
    for case in names:
        for capability in CAPABILITIES:
            for index, launch in enumerate(launches_of(case, capability)):
                source = fingerprint(launch, capability)
                if source not in seen:
                    seen.add(source)
                    yield case, index, capability, source


def committed() -> list[Row]:
    """The rows of the table that is there."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    rows = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in lines if line.startswith("| ")]
    return [row for row in rows[1:] if len(row) == len(HEADER)]


def problems(rows: list[Row]) -> list[str]:
    """Kernels that spill more than they may, or do not fit."""
    from benchmarks.kernel_compiling import SHARED_LIMIT, SPILL_LIMIT

    found = []
    for case, kernel, gpu, _, _, spilled, shared, _ in rows:
        limit = SHARED_LIMIT[int(gpu.removeprefix("sm_"))]
        if int(spilled) > SPILL_LIMIT:
            found.append(f"{case}: {kernel} spills {spilled} bytes on {gpu}; expected at most {SPILL_LIMIT}")
        if int(shared) > limit:
            found.append(
                f"{case}: {kernel} takes {shared} bytes of shared memory on {gpu}, which has {limit}"
            )
    return found


def page(rows: list[Row]) -> str:
    """The text of the table's file."""
    import triton

    lines = [
        "# Resources of the kernels",
        "",
        f"`python -m benchmarks.kernel_resources`, triton {triton.__version__} and its ptxas; no GPU is needed.",
        "",
    ]
    return "\n".join(lines + table(HEADER, map(table_row, rows)))


def main() -> int:
    parser = whole_help(__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the table that is there")
    parser.add_argument(
        "--sample", type=int, metavar="N", help="with --check: compile N drawn rows, not all of them"
    )
    parser.add_argument("--fresh", action="store_true", help="compile the rows that the table has, too")
    parser.add_argument("--only", default="", help="print cases whose name holds this, and write nothing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    wanted = list(tasks([name for name in cases() if arguments.only in name]))
    known = {row[-1]: row for row in committed()}
    compiled = [task for task in wanted if arguments.fresh or arguments.check or task[-1] not in known]
    if arguments.check and arguments.sample is not None:
        compiled = random.sample(compiled, min(arguments.sample, len(compiled)))
    # Not forked: noting a backward starts threads, which a fork would leave waiting for ever.
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        for row in pool.map(row_of, compiled):
            known[row[-1]] = row
            print("  ".join(row), file=sys.stderr, flush=True)
    # A case may have got another name, or be the first one to start a launch.
    rows = [(task[0], *known[task[-1]][1:]) for task in wanted if task[-1] in known]
    found = problems(rows)
    if arguments.only:
        pass
    elif not arguments.check:
        TABLE.write_text(page(rows))
    elif len(rows) < len(wanted) or TABLE.read_text() != page(rows):
        found.append(f"{TABLE} differs; run python -m benchmarks.kernel_resources and look at what changed")
    print("\n".join(found), file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
