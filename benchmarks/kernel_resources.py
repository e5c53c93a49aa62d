"""Registers, spills and shared memory of every kernel, compiled for GPUs that need not be there.

    python -m benchmarks.kernel_resources             writes benchmarks/results/kernel_resources.md
    python -m benchmarks.kernel_resources --check     fails where that table differs, or a kernel spills or does not fit

A case is a call of an op, forward and backward, on empty tensors; its launches are noted down and compiled.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

TABLE = Path(__file__).parent / "results" / "kernel_resources.md"
CAPABILITIES = (80, 90)
HEADER = ("case", "kernel", "GPU", "warps", "registers", "spilled bytes", "shared bytes")


def kernel_attention_case(
    feature_map: str,
    width: int,
    dtype: str = "bfloat16",
    *,
    group: int = 1,
    causal: bool = True,
    packed: bool = False,
    weighted: bool = False,
) -> Callable[[], None]:
    def call() -> None:
        import torch

        from megakernel.ops import kernel_attention
        from megakernel.ops.feature_maps import FEATURE_MAPS

        # Long enough that segments have their full length; nothing is computed, and little of it is touched.
        length = 65536
        options = {"dtype": getattr(torch, dtype), "requires_grad": True}
        q = torch.empty(1, group, length, width, **options)
        k, v = (torch.empty(1, 1, length, width, **options) for _ in range(2))
        projection = None
        if FEATURE_MAPS[feature_map].projected:
            projection = torch.empty(1, width, width, requires_grad=True)
        out = kernel_attention(
            *(q, k, v),
            feature_map=feature_map,
            projection=projection,
            causal=causal,
            mass=torch.empty(1, 1, length, requires_grad=True) if weighted else None,
            positions=torch.zeros(1, length, dtype=torch.int64) if packed else 0,
            backend="triton",
        )
        out.backward(torch.empty_like(out))

    return call


CASES: dict[str, Callable[[], None]] = {
    "kernel_attention elu d=64": kernel_attention_case("elu", 64),
    "kernel_attention elu d=128": kernel_attention_case("elu", 128),
    "kernel_attention elu d=128, 4 queries a key": kernel_attention_case("elu", 128, group=4),
    "kernel_attention elu d=128, both ways": kernel_attention_case("elu", 128, causal=False),
    "kernel_attention elu d=64 float32": kernel_attention_case("elu", 64, "float32"),
    "kernel_attention hedgehog d=64": kernel_attention_case("hedgehog", 64),
    "kernel_attention hedgehog d=128": kernel_attention_case("hedgehog", 128),
    "kernel_attention favor d=64": kernel_attention_case("favor", 64),
    "kernel_attention favor d=128": kernel_attention_case("favor", 128),
    "kernel_attention favor d=128, documents": kernel_attention_case("favor", 128, packed=True),
    "kernel_attention hedgehog d=128, masses": kernel_attention_case("hedgehog", 128, weighted=True),
    "kernel_attention rks d=64": kernel_attention_case("rks", 64),
    "kernel_attention rks d=128": kernel_attention_case("rks", 128),
}
"""Name -> a call of an op."""


def rows_of(task: tuple[str, int, int]) -> tuple[str, ...]:
    """The table's row of one launch of a case for one GPU."""
    case, index, capability = task
    from megakernel.ops.kernels.compiling import compile_launch

    launch = launches_of(case)[index]
    found = compile_launch(launch, capability)
    numbers = (launch.warps, found.registers, found.spilled, found.shared)
    return (case, launch.kernel.__name__, f"sm_{capability}", *map(str, numbers))


def launches_of(case: str) -> list:
    """What a case would start."""
    from megakernel.ops.kernels.launch import noting

    with noting() as launches:
        CASES[case]()
    return launches


def tasks(cases: list[str]) -> Iterator[tuple[str, int, int]]:
    """One for each launch and GPU; launches of one kernel with one configuration come once."""
    seen = set()
    for case in cases:
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
    cases = [case for case in CASES if arguments.only in case]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        rows = []
        for row in pool.map(rows_of, tasks(cases)):
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
