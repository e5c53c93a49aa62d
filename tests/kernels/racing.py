"""Compiles a loop whose pipelined operand Triton overwrites too early: `python -m tests.kernels.racing`.

Prints how many such copies `kernel_races` finds with one, two and three stages.
"""

import json
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def products_and_squares(x, w, out, STEPS: tl.constexpr, STAGES: tl.constexpr):
    """A tile of x is an operand of two products, and also read into registers."""
    rows, columns = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    total = tl.zeros((64, 64), tl.float32)
    squares = tl.zeros((64,), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        part = tl.load(x + step * 64 + rows * 1024 + columns)
        first = tl.load(w + step * 64 + rows * 1024 + columns)
        second = tl.load(w + 65536 + step * 64 + rows * 1024 + columns)
        total += tl.dot(part, tl.trans(first))
        total += tl.dot(part, tl.trans(second))
        exact = part.to(tl.float32)
        squares += tl.sum(exact * exact, 1)
    tl.store(out + rows * 64 + columns, total + squares[:, None])


def main() -> int:
    from benchmarks.kernels.compiling import compile_kernel
    from benchmarks.kernels.races import overwritten_operands
    from megakernel.ops.kernels.launch import Launch

    counts = []
    x, out = torch.empty(2, 64, 1024, dtype=torch.bfloat16), torch.empty(64, 64)
    for stages in (1, 2, 3):
        options = {"STEPS": 16, "STAGES": stages}
        compiled = compile_kernel(Launch(products_and_squares, (1,), (x, x, out), options, 4, 1), 90)
        counts.append(len(overwritten_operands(compiled.asm["ttgir"])))
    print(json.dumps(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
