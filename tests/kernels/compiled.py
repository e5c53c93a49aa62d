"""Checks offsets and memory hazards in the kernels' TTIR: `python -m tests.kernels.compiled`.

A stride may be near 2^31, so products of strides must be 64 bits wide. Rows of a tile are the exception: they are few,
and their strides bounded (`launch.contiguous_rows`).

Threads that hold copies of the same element load it separately, at different times. If the program then overwrites the
element without a barrier in between, some threads may load the new value.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import torch

STRIDE = re.compile(r"%\w+_(batch|head|row)$")
RESULT = re.compile(r"^\s*(%\w+)(?::\d+)? = (?:\"?)([\w.]+)")
VALUE = re.compile(r"%\w+")
SAME = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape")
SUMS = ("arith.addi", "arith.subi", "arith.muli", "arith.select", "arith.minsi", "arith.maxsi")
PARAMETER = re.compile(r"(%\w+): (?:!tt\.ptr<\w+>|\w+)")


REPOSITORY = Path(__file__).parents[2]


def without_interpreter(*words: str) -> subprocess.CompletedProcess[str]:
    """`python -m` with these words in a new process without TRITON_INTERPRET, so that kernels can be compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", *words]
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )


def parts(value: object, name: str, plain: bool) -> Iterator[str]:
    """Names of a kernel argument's parts at run time; None and, unless `plain`, 1 are compile-time constants."""
    if isinstance(value, tuple):
        for part, field in zip(value, getattr(value, "_fields", map(str, range(len(value))))):
            yield from parts(part, f"{name}_{field}", plain)
    elif value is not None and (plain or not (isinstance(value, int) and value == 1)):
        yield name


def with_names(
    text: str, arguments: Iterable[object], names: Iterable[str], plain: Collection[str] = ()
) -> str:
    """A kernel's TTIR with names for the numbered parts of tuples: %keys_3 becomes %keys_columns_row.

    plain: arguments in which 1 is a number as any other (`do_not_specialize`).
    """
    expected = [x for value, name in zip(arguments, names) for x in parts(value, name, name in plain)]
    found = PARAMETER.findall(text.split("tt.func")[1].split("{\n")[0])
    assert len(found) == len(expected), (found, expected)
    named = dict(zip(found, expected))
    return VALUE.sub(lambda match: f"%{named[match[0]]}" if match[0] in named else match[0], text)


def products(text: str) -> list[str]:
    """The lines of a kernel's TTIR that multiply a stride in 32 bits by anything but the rows of a tile."""
    strides = {name for name in VALUE.findall(text.split("tt.func")[1].split("{\n")[0]) if STRIDE.match(name)}
    rows: set[str] = set()
    found = []
    for line in text.splitlines():
        # Sibling regions reuse names.
        for inner, outer in re.findall(r"(%\w+) = (%\w+)", line):  # loop-carried values
            (strides.add if outer in strides else strides.discard)(inner)
        match = RESULT.match(line)
        if match is None:
            continue
        name, operation = match.groups()
        operands = VALUE.findall(line.split("=", 1)[1])
        of_rows = any(x in rows for x in operands[: 1 if operation in SAME else None])
        of_strides = any(x in strides for x in operands)
        kinds = {"stride" if x in strides else "row" if x in rows else "" for x in operands}
        rows.discard(name)
        strides.discard(name)
        if "i64" in line.split(" loc(")[0].rsplit(":", 1)[-1]:
            continue
        if operation == "tt.make_range" or (operation in (*SAME, "arith.minsi") and of_rows):
            rows.add(name)
        if operation == "arith.muli" and "stride" in kinds and "row" not in kinds:
            found.append(line.strip().split(" loc(")[0])
        if operation in SAME + SUMS and of_strides:
            strides.add(name)
    return found


def reused(text: str) -> set[str]:
    """The arguments of a kernel that it both loads from and stores to."""
    roots = {name: {name} for name in re.findall(r"(%\w+): !tt.ptr", text)}
    loaded: set[str] = set()
    stored: set[str] = set()
    for line in text.splitlines():
        for inner, outer in re.findall(r"(%\w+) = (%\w+)", line):
            if outer in roots:
                roots[inner] = roots[outer]
        match = RESULT.match(line)
        operands = VALUE.findall(line.split("=", 1)[1] if match else line)
        # A select may return either operand.
        of = set().union(*(roots.get(x, ()) for x in operands))
        if match and match[2] in (*SAME, "tt.addptr", "arith.select") and of:
            roots[match[1]] = of
        elif match and match[2] == "tt.load":
            loaded |= roots[operands[0]]
        elif line.lstrip().startswith("tt.store"):
            stored |= roots[operands[0]]
    return {name.removeprefix("%") for name in loaded & stored}


def main() -> int:
    from benchmarks.kernels.compiling import ttir
    from megakernel.ops.kernels.launch import record_launches
    from tests.kernels.calls import EXCHANGED, FORWARD, one_token

    with record_launches() as launches:
        one_token("favor")
        for call in (*FORWARD.values(), *EXCHANGED.values()):
            out = call()
            out.backward(torch.empty_like(out))
    for launch in launches:
        plain = [one.name for one in launch.kernel.params if one.do_not_specialize]
        text = with_names(ttir(launch, 90), launch.arguments, launch.kernel.arg_names, plain)
        name = f"{launch.kernel.__module__}.{launch.kernel.__name__}".removeprefix("megakernel.ops.")
        print(json.dumps([name, products(text), sorted(reused(text))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
