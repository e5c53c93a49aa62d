"""Compiles the kernels for GPUs that need not be present, and looks for spills, shared memory and races.

    python -m benchmarks.kernels.resources                            all cases: an hour on two cores
    python -m benchmarks.kernels.resources --gpu 90 --only "FLuRKA hedgehog d=128"

A case (`benchmarks.kernels.cases`) is a call of an op, forward and backward; its launches are recorded and compiled. A
launch that compiles to the same code as an earlier one is not repeated. A line per launch is printed, and status 1
says that one exceeds a limit or overwrites an operand of a product that still runs (`benchmarks.kernels.races`): only
this check shows that a kernel may compute wrong numbers where tests in Triton's interpreter pass.
"""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from multiprocessing import get_context
from typing import NamedTuple

from benchmarks.page import docstring_parser

CAPABILITIES = (80, 90, 100, 120)


class Compilation(NamedTuple):
    """One launch of a case on one GPU."""

    case: str
    launch: int
    capability: int


def launches_of(case: str, capability: int) -> list:
    """The launches of a case on a GPU; none if the op's kernels do not support it."""
    # Imported late: TRITON_INTERPRET must be unset before triton is imported.
    from benchmarks.kernels.cases import CASES
    from megakernel.ops.kernels.launch import record_launches

    with record_launches(capability) as launches:
        try:
            CASES[case]()
        except ValueError as error:
            print(f"{case} on sm_{capability}: {error}", file=sys.stderr)
    return launches


_cached_launches = lru_cache(maxsize=1)(launches_of)  # a process compiles the launches of a case in turn


def tasks(names: list[str], capabilities: list[int]) -> Iterator[Compilation]:
    """A task for each launch and GPU, without those that compile to the same code as an earlier one."""
    from benchmarks.kernels.compiling import fingerprint

    seen = set()
    for case in names:
        for capability in capabilities:
            for index, launch in enumerate(launches_of(case, capability)):
                code = fingerprint(launch, capability)
                if code not in seen:
                    seen.add(code)
                    yield Compilation(case, index, capability)


def compiled(task: Compilation) -> tuple[str, list[str]]:
    """A line about one compiled launch, and a line for each limit that it exceeds."""
    from benchmarks.kernels.compiling import SHARED_LIMIT, SPILL_LIMIT, compile_launch

    launch = _cached_launches(task.case, task.capability)[task.launch]
    used = compile_launch(launch, task.capability)
    name = f"{task.case}: {launch.kernel.__name__} on sm_{task.capability}"
    most, limit = SPILL_LIMIT[task.capability], SHARED_LIMIT[task.capability]
    problems = []
    if used.spilled > most:
        problems.append(f"{name} spills {used.spilled} bytes; expected at most {most}")
    if used.shared > limit:
        problems.append(f"{name} takes {used.shared} bytes of shared memory; the GPU has {limit}")
    if used.overwritten:
        problems.append(f"{name} overwrites operands of {used.overwritten} products that still run")
    line = f"{launch.warps} warps, {used.registers} registers, {used.spilled} bytes spilled, {used.shared} shared"
    return f"{name}: {line}", problems


def main() -> int:
    parser = docstring_parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="CASE", help="these cases (default: all)")
    parser.add_argument(
        "--gpu", type=int, nargs="+", choices=CAPABILITIES, default=CAPABILITIES, help="compute capabilities"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    from benchmarks.kernels.cases import CASES

    names = arguments.only or list(CASES)
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"{unknown[0]!r} is no case; choose {', '.join(CASES)}")
    found: list[str] = []
    # Spawned: recording a backward starts threads, and forked workers would wait for them forever.
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        for line, problems in pool.map(compiled, tasks(names, arguments.gpu)):
            print(line, flush=True)
            found += problems
    print("\n".join(found), file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
