"""Which way kernel states take between the shards of a sequence; loads no torch, for the planner asks too."""

import math
from typing import Literal

Way = Literal["gather", "ring"]

HOP_SECONDS = 30e-6
"""From one device's memory to the next for a few bytes, with the kernels that add to them; assumed."""

BYTES_PER_SECOND = 50e9
"""Between devices of two machines; assumed, a 400 Gb/s adapter per device."""

MOST_GATHERED = 2**28
"""Bytes of states that a process may hold at once."""

MOST_PARTS = 16
"""A part is at least some feature rows; more parts gain little."""


def way(size: int, message_bytes: int) -> Way:
    """The shorter way between `size` shards, by a model of the network.

    A gather moves P - 1 messages of S bytes past each process, (P - 1) S / w seconds and one hop. A message that is
    passed on in K parts has gone round after P + K - 2 hops of S / K bytes. Both grow with P: what decides is whether S
    bytes take longer than a hop, which is so from about 3 MB on (16 key heads with F = D = 128 have 1). But a gather
    holds P states, and beyond MOST_GATHERED they are passed on.
    """
    if size * message_bytes > MOST_GATHERED:
        return "ring"
    gather = HOP_SECONDS + (size - 1) * message_bytes / BYTES_PER_SECOND
    count = parts(size, message_bytes)
    ring = (size + count - 2) * (HOP_SECONDS + message_bytes / count / BYTES_PER_SECOND)
    return "gather" if gather <= ring else "ring"


def parts(size: int, message_bytes: int) -> int:
    """K at which (P + K - 2) (hop + S / (K w)) is least."""
    best = math.sqrt(max(0, size - 2) * message_bytes / (BYTES_PER_SECOND * HOP_SECONDS))
    return min(MOST_PARTS, max(1, round(best)))
