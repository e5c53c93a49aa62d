"""Finds operands of matrix products that are overwritten while the product still runs, in Triton's TTGIR.

With wgmma, products run on while the program goes on. In a pipelined loop, Triton starts the copy of a later step's
operand meanwhile. Triton 3.6 and 3.7 give too few buffers to a loaded tile that a product and other operations read
(triton-lang/triton, issue 6691): the copy starts before the product has ended. An operand in registers can be computed
again before the product of the iteration before has ended (issue 9433). Results then differ from run to run, by little
enough to pass for rounding.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

LOOP = re.compile(r"\bscf\.(for|while)\b")
NAME = r"%[\w$]+(?:#\d+)?"
VALUE = re.compile(rf"^\s*({NAME})(?::\d+)? = ")
VIEW = re.compile(rf"({NAME})(?::\d+)? = ttg\.memdesc_\w+ ({NAME})")
PRODUCT = re.compile(rf"ttng\.warp_group_dot ({NAME}), ({NAME}),.*isAsync = true")
WAIT = re.compile(r"ttng\.warp_group_dot_wait .*pendings = (\d+)")
COPY = re.compile(rf"ttg\.async_copy_global_to_local {NAME}, ({NAME})")


class Body(NamedTuple):
    """What one iteration of a loop does, without loops inside of it; numbers are lines."""

    products: list[tuple[int, tuple[str, str]]]
    """Asynchronous products and their operands: buffers, or values in registers."""

    waits: list[tuple[int, int]]
    """Waits for products, and how many of the last ones they leave running."""

    copies: list[tuple[int, str]]
    """Copies and their buffers."""

    values: dict[str, int]
    """Values and where they are computed."""

    ahead: Counter[str]
    """Buffer -> copies before the loop, which are how many iterations the copies run ahead of their use."""


def overwritten_operands(ttgir: str) -> list[str]:
    """A line for each operand that may be overwritten before its product has ended."""
    lines = ttgir.splitlines()
    roots: dict[str, str] = {}
    slots: dict[str, int] = {}
    for line in lines:
        if view := VIEW.search(line):
            roots[view[1]] = roots.get(view[2], view[2])
            if shape := re.search(r"memdesc_index .*?memdesc<(\d+)x", line):
                slots.setdefault(roots[view[1]], int(shape[1]))
    found = []
    for body in _loops(lines, roots):
        for product, operands in body.products:
            overwrites = [
                (at, buffer, body.ahead[buffer] % slots.get(buffer, 1) == 0)
                for at, buffer in body.copies
                if buffer in operands
            ]
            # A value belongs to the product of the same iteration, so only the one before may still read it.
            overwrites += [(body.values[x], x, False) for x in operands[:1] if x in body.values]
            found += [
                f"line {at + 1}: {operand} is overwritten while the product of line {product + 1} may read it"
                for at, operand, same in overwrites
                if not _has_ended(body, product, at, same)
            ]
    return found


def _loops(lines: Sequence[str], roots: dict[str, str]) -> list[Body]:
    """The bodies of the loops; indentation tells where they end."""
    bodies = []
    open_loops: list[tuple[int, Body]] = []
    copied: Counter[str] = Counter()
    for at, line in enumerate(lines):
        depth = len(line) - len(line.lstrip())
        while open_loops and line.strip() and depth <= open_loops[-1][0]:
            bodies.append(open_loops.pop()[1])
        body = open_loops[-1][1] if open_loops else Body([], [], [], {}, Counter())
        if LOOP.search(line):
            open_loops.append((depth, Body([], [], [], {}, copied.copy())))
            continue
        if value := VALUE.match(line):
            body.values[value[1]] = at
        if found := PRODUCT.search(line):
            body.products.append((at, (roots.get(found[1], found[1]), roots.get(found[2], found[2]))))
        elif found := WAIT.search(line):
            body.waits.append((at, int(found[1])))
        elif found := COPY.search(line):
            buffer = roots.get(found[1], found[1])
            body.copies.append((at, buffer))
            copied[buffer] += 1
    return bodies


def _has_ended(body: Body, product: int, overwrite: int, same: bool) -> bool:
    """Whether the last product that reads what `overwrite` changes has ended before it.

    same: that product is the one of the same iteration if it comes first; otherwise that of the one before, at worst.
    """
    places = [at for at, _ in body.products]
    if same and product < overwrite:
        return any(
            product < at < overwrite and sum(product < place < at for place in places) >= left
            for at, left in body.waits
        )
    later = sum(place > product for place in places)
    return any(
        (at > product and sum(product < place < at for place in places) >= left)
        or (at < overwrite and later + sum(place < at for place in places) >= left)
        for at, left in body.waits
    )
