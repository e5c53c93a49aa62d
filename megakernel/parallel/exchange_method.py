"""Chooses how context-parallel shards exchange kernel states. Imports no torch, because the planner uses it too."""

import math
from typing import Literal

ExchangeMethod = Literal["gather", "ring"]

HOP_SECONDS = 30e-6
"""Assumed latency of passing a few bytes to the next device, including the kernels that process them."""

BYTES_PER_SECOND = 50e9
"""Assumed bandwidth between devices of two machines: a 400 Gb/s adapter per device."""

MAX_GATHERED_BYTES = 2**28
"""Bytes of gathered states that a process may hold."""

MAX_PARTS = 16
"""Parts of a message; more gain little."""


def choose_method(size: int, message_bytes: int) -> ExchangeMethod:
    """The faster exchange between `size` shards, by a model of the network.

    An all-gather takes one hop and (P - 1) S / w seconds for messages of S bytes. A ring that passes a message on in K
    parts takes P + K - 2 hops of S / K bytes. Both grow with P; the ring wins if S bytes take longer than a hop, from
    about 3 MB on (16 key heads with F = D = 128 have 1 MB). An all-gather holds P states: beyond MAX_GATHERED_BYTES,
    the ring is used.
    """
    if size * message_bytes > MAX_GATHERED_BYTES:
        return "ring"
    gather = HOP_SECONDS + (size - 1) * message_bytes / BYTES_PER_SECOND
    count = ring_parts(size, message_bytes)
    ring = (size + count - 2) * (HOP_SECONDS + message_bytes / count / BYTES_PER_SECOND)
    return "gather" if gather <= ring else "ring"


def ring_parts(size: int, message_bytes: int) -> int:
    """The K that minimizes (P + K - 2) (hop + S / (K w))."""
    best = math.sqrt(max(0, size - 2) * message_bytes / (BYTES_PER_SECOND * HOP_SECONDS))
    return min(MAX_PARTS, max(1, round(best)))
