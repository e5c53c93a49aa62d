"""Registers, spills, shared memory and races of every kernel, compiled for GPUs that need not be present.

    python -m benchmarks.kernel_resources             writes benchmarks/results/kernel_resources.md
    python -m benchmarks.kernel_resources --check     fails if that table differs or a kernel exceeds a limit

A case (`kernel_cases`) is a call of an op, forward and backward; its launches are recorded and compiled. A launch that
compiles to the same code as an earlier one is not repeated. The column `source` is a fingerprint of all inputs of the
compilation: a row whose fingerprint is in the table is taken from there; --fresh compiles all rows again, and
`--check --sample 8` a random few.
"""

import os
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

from benchmarks.page import docstring_parser, table, table_row

TABLE = Path(__file__).parent / "results" / "kernel_resources.md"
CAPABILITIES = (80, 90, 100, 120)
HEADER = (
    "case",
    "kernel",
    "GPU",
    "warps",
    "registers",
    "spilled bytes",
    "shared bytes",
    "overwritten",
    "source",
)

Row = tuple[str, ...]
"""The cells of HEADER."""

SPILLED = HEADER.index("spilled bytes")

SPILL_VARIATION = 128
"""Most bytes by which two compilations of a row may differ: ptxas allocates registers by addresses that Linux draws. Of
40 kernels with at least 200 registers it spilled one's in two ways, 264 and 284 bytes, in five runs on the same PTX;
another one's 120 and 156 (x86, ptxas 13.5; both for sm_90)."""

Task = tuple[str, int, int, str]
"""Case, index of the launch, capability, fingerprint."""


def cases() -> dict:
    """The cases. Imported late: TRITON_INTERPRET must be unset before triton is imported."""
    from benchmarks.kernel_cases import CASES

    return CASES


def row_of(task: Task) -> Row:
    """Compile one launch of a case for one GPU and return its row."""
    case, index, capability, source = task
    from benchmarks.kernel_compiling import compile_launch

    launch = launches_of(case, capability)[index]
    used = compile_launch(launch, capability)
    numbers = map(str, (launch.warps, *used))
    return (case, launch.kernel.__name__, f"sm_{capability}", *numbers, source)


@lru_cache(maxsize=1)  # a process compiles the launches of a case one after another
def launches_of(case: str, capability: int) -> list:
    """The launches of a case on a GPU; none if the op's kernels do not support it."""
    from megakernel.ops.kernels.launch import record_launches

    with record_launches(capability) as launches:
        try:
            cases()[case]()
        except ValueError as error:
            print(f"{case} on sm_{capability}: {error}", file=sys.stderr)
    return launches


def tasks(names: list[str]) -> Iterator[Task]:
    """A task for each launch and GPU, without those that compile to the same code as an earlier one."""
    from benchmarks.kernel_compiling import fingerprint

    seen = set()
    for case in names:
        for capability in CAPABILITIES:
            for index, launch in enumerate(launches_of(case, capability)):
                source = fingerprint(launch, capability)
                if source not in seen:
                    seen.add(source)
                    yield case, index, capability, source


def committed_rows() -> list[Row]:
    """The rows of the committed table."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    rows = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in lines if line.startswith("| ")]
    return [row for row in rows[1:] if len(row) == len(HEADER)]


def agree(row: Row, other: Row) -> bool:
    """Whether two compilations have the same row, but for SPILL_VARIATION and the name of the case."""
    variation = abs(int(row[SPILLED]) - int(other[SPILLED]))
    return variation <= SPILL_VARIATION and all(
        a == b for column, (a, b) in enumerate(zip(row, other)) if column not in (0, SPILLED)
    )


def problems(rows: list[Row]) -> list[str]:
    """Kernels that exceed SPILL_LIMIT or SHARED_LIMIT or have a race, one line each."""
    from benchmarks.kernel_compiling import SHARED_LIMIT, SPILL_LIMIT

    errors = []
    for case, kernel, gpu, _, _, spilled, shared, overwritten, _ in rows:
        capability = int(gpu.removeprefix("sm_"))
        limit, most = SHARED_LIMIT[capability], SPILL_LIMIT[capability]
        if int(spilled) > most:
            errors.append(f"{case}: {kernel} spills {spilled} bytes on {gpu}; expected at most {most}")
        if int(shared) > limit:
            errors.append(
                f"{case}: {kernel} takes {shared} bytes of shared memory on {gpu}, which has {limit}"
            )
        if int(overwritten):
            errors.append(
                f"{case}: {kernel} overwrites operands of products that still run on {gpu}, see kernel_races"
            )
    return errors


def page(rows: list[Row]) -> str:
    """The text of the table's file."""
    import triton

    from megakernel.ops.kernels.assembler import RELEASE, dotted

    lines = [
        "# Resources of the kernels",
        "",
        f"`python -m benchmarks.kernel_resources`, triton {triton.__version__}, for sm_90 ptxas {dotted(RELEASE)}, "
        "for the others Triton's own; no GPU is needed.",
        "",
    ]
    return "\n".join(lines + table(HEADER, map(table_row, rows)))


def main() -> int:
    parser = docstring_parser(__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the committed table")
    parser.add_argument(
        "--sample", type=int, metavar="N", help="with --check: compile N random rows instead of all"
    )
    parser.add_argument("--fresh", action="store_true", help="also compile rows that are in the table")
    parser.add_argument("--only", default="", help="print cases whose name contains this, and write nothing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    all_tasks = list(tasks([name for name in cases() if arguments.only in name]))
    known = {row[-1]: row for row in committed_rows()}
    to_compile = [task for task in all_tasks if arguments.fresh or arguments.check or task[-1] not in known]
    if arguments.check and arguments.sample is not None:
        to_compile = random.sample(to_compile, min(arguments.sample, len(to_compile)))
    # Spawned: recording a backward starts threads, and forked workers would wait for them forever.
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        for row in pool.map(row_of, to_compile):
            if not (arguments.check and row[-1] in known and agree(row, known[row[-1]])):
                known[row[-1]] = row
            print("  ".join(row), file=sys.stderr, flush=True)
    # Take the case's name from the task: a case may have been renamed, or another one may now have a launch first.
    rows = [(task[0], *known[task[-1]][1:]) for task in all_tasks if task[-1] in known]
    errors = problems(rows)
    if arguments.only:
        pass
    elif not arguments.check:
        TABLE.write_text(page(rows))
    elif len(rows) < len(all_tasks) or TABLE.read_text() != page(rows):
        errors.append(f"{TABLE} differs; run python -m benchmarks.kernel_resources and look at what changed")
    print("\n".join(errors), file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
