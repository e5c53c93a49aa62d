"""Finds operands of matrix products that are overwritten while the product still runs, in Triton's TTGIR.

With wgmma, products run on while the program goes on. In a pipelined loop, Triton starts the copy of a later step's
operand meanwhile. Triton 3.6 and 3.7 give too few buffers to a loaded tile that a product and other operations read
(triton-lang/triton, issue 6691): the copy starts before the product has ended. An operand in registers can be computed
again before the product of the iteration before has ended (issue 9433). Results then differ from run to run, by little
enough to pass for rounding.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

LOOP = re.compile(r"\bscf\.for\b")
NAME = r"%[\w$]+(?:#\d+)?"
VALUE = re.compile(rf"^\s*({NAME})(?::\d+)? = ")
ALLOCATION = re.compile(rf"({NAME}) = ttg\.local_alloc ")
VIEW = re.compile(rf"({NAME})(?::\d+)? = ttg\.memdesc_\w+ ({NAME})")
INDEX = re.compile(r"memdesc_index .*?memdesc<(\d+)x")
PRODUCT = re.compile(rf"ttng\.warp_group_dot ({NAME}), ({NAME}),.*isAsync = true")
WAIT = re.compile(r"ttng\.warp_group_dot_wait .*pendings = (\d+)")
COPY = re.compile(rf"ttg\.async_copy_global_to_local {NAME}, ({NAME})")


class LoopBody(NamedTuple):
    """What one iteration of a loop does, without loops inside of it; numbers are lines."""

    depth: int
    """Indentation of the loop."""

    ahead: Counter[str]
    """Buffer -> copies before the loop, which are how many iterations the copies run ahead of their use."""

    products: list[tuple[int, tuple[str, ...]]]
    """Asynchronous products and their operands: buffers, or values in registers."""

    waits: list[tuple[int, int]]
    """Waits for products, and how many of the last ones they leave running."""

    copies: list[tuple[int, str, int]]
    """Copies, their buffers, and the buffers' slots."""

    values: dict[str, int]
    """Values, and buffers of one iteration, and where they are computed."""


def overwritten_operands(ttgir: str) -> list[str]:
    """A line for each operand that may be overwritten before its product has ended."""
    found: list[str] = []
    # Loops side by side use the same names again, so that names have their meaning from above.
    roots: dict[str, str] = {}
    slots: dict[str, int] = {}
    copied: Counter[str] = Counter()
    open_loops: list[LoopBody] = []
    for at, line in enumerate(ttgir.splitlines()):
        depth = len(line) - len(line.lstrip())
        while open_loops and line.strip() and depth <= open_loops[-1].depth:
            found += _overwritten(open_loops.pop())
        if LOOP.search(line):
            open_loops.append(LoopBody(depth, copied.copy(), [], [], [], {}))
            continue
        if view := VIEW.search(line):
            roots[view[1]] = roots.get(view[2], view[2])
            if index := INDEX.search(line):
                slots.setdefault(roots[view[1]], int(index[1]))
        elif value := VALUE.match(line):
            for table in (roots, slots, copied) if ALLOCATION.search(line) else (roots,):
                table.pop(value[1], None)
            if open_loops:
                open_loops[-1].values[value[1]] = at
        body = open_loops[-1] if open_loops else None
        if copy := COPY.search(line):
            buffer = roots.get(copy[1], copy[1])
            copied[buffer] += 1
            if body is not None:
                body.copies.append((at, buffer, slots.get(buffer, 1)))
        elif body is not None and (product := PRODUCT.search(line)):
            body.products.append((at, tuple(roots.get(name, name) for name in product.groups())))
        elif body is not None and (wait := WAIT.search(line)):
            body.waits.append((at, int(wait[1])))
    return found


def _overwritten(body: LoopBody) -> Iterator[str]:
    for product, operands in body.products:
        overwrites = [
            (at, buffer, body.ahead[buffer] % slots == 0)
            for at, buffer, slots in body.copies
            if buffer in operands
        ]
        # These belong to the product of the same iteration, so only the one before may still read them.
        overwrites += [(body.values[x], x, False) for x in operands if x in body.values]
        for at, operand, same in overwrites:
            if not _has_ended(body, product, at, same):
                yield f"line {at + 1}: {operand} is overwritten while the product of line {product + 1} may read it"


def _has_ended(body: LoopBody, product: int, overwrite: int, same: bool) -> bool:
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
