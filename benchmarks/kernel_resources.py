"""Registers, spills and shared memory of every kernel, compiled for GPUs that need not be there.

    python -m benchmarks.kernel_resources             writes benchmarks/results/kernel_resources.md
    python -m benchmarks.kernel_resources --check     fails where that table differs, or a kernel spills or does not fit

A case (`kernel_cases`) is a call of an op, forward and backward; its launches are noted down and compiled. A launch
that compiles to what one before it did is not repeated.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

TABLE = Path(__file__).parent / "results" / "kernel_resources.md"
CAPABILITIES = (80, 90)
HEADER = ("case", "kernel", "GPU", "warps", "registers", "spilled bytes", "shared bytes")


def cases() -> dict:
    """The cases; imported late, for triton must not find TRITON_INTERPRET."""
    from benchmarks.kernel_cases import CASES

    return CASES


def rows_of(task: tuple[str, int, int]) -> tuple[str, ...]:
    """The table's row of one launch of a case for one GPU."""
    case, index, capability = task
    from megakernel.ops.kernels.compiling import compile_launch

    launch = launches_of(case)[index]
    found = compile_launch(launch, capability)
    numbers = (launch.warps, found.registers, found.spilled, found.shared)
    return (case, launch.kernel.__name__, f"sm_{capability}", *map(str, numbers))


@lru_cache(maxsize=1)  # a process compiles the launches of a case one after another
def launches_of(case: str) -> list:
    """What a case would start."""
    from megakernel.ops.kernels.launch import noting

    with noting() as launches:
        cases()[case]()
    return launches


def tasks(names: list[str]) -> Iterator[tuple[str, int, int]]:
    """One for each launch and GPU."""
    seen = set()
    for case in names:
        for index, launch in enumerate(launches_of(case)):
            # Sizes tell compilers whether they are 1 or multiples of 16, and tensors their type.
            told = [x if isinstance(x, int) else x.dtype for x in launch.arguments]
            kind = (launch.kernel.__name__, launch.warps, launch.stages, str(launch.options), str(told))
            if kind in seen:
                continue
            seen.add(kind)
            for capability in CAPABILITIES:
                yield case, index, capability


def problems(rows: list[tuple[str, ...]]) -> list[str]:
    """Kernels that spill or do not fit."""
    from megakernel.ops.kernels.compiling import SHARED_LIMIT

    found = []
    for case, kernel, gpu, _, _, spilled, shared in rows:
        limit = SHARED_LIMIT[int(gpu.removeprefix("sm_"))]
        if int(spilled):
            found.append(f"{case}: {kernel} spills {spilled} bytes on {gpu}")
        if int(shared) > limit:
            found.append(
                f"{case}: {kernel} takes {shared} bytes of shared memory on {gpu}, which has {limit}"
            )
    return found


def page(rows: list[tuple[str, ...]]) -> str:
    """The text of the table's file."""
    import triton

    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return (
        "# Resources of the kernels\n\n"
        f"`python -m benchmarks.kernel_resources`, triton {triton.__version__} and its ptxas; no GPU is needed.\n\n"
        + "\n".join(lines)
        + "\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare with the table that is there")
    parser.add_argument("--only", default="", help="print cases whose name holds this, and write nothing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    names = [name for name in cases() if arguments.only in name]
    # Not forked: noting a backward starts threads, which a fork would leave waiting for ever.
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        rows = []
        for row in pool.map(rows_of, tasks(names)):
            rows.append(row)
            print("  ".join(row), file=sys.stderr, flush=True)
    found = problems(rows)
    if arguments.only:
        pass
    elif not arguments.check:
        TABLE.write_text(page(rows))
    elif TABLE.read_text() != page(rows):
        found.append(f"{TABLE} differs; run python -m benchmarks.kernel_resources and look at what changed")
    print("\n".join(found), file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
