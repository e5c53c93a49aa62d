"""Chooses how context-parallel shards exchange kernel states. Imports no torch, because the planner uses it too."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Literal

ExchangeMethod = Literal["gather", "ring"]

HOP_SECONDS = 30e-6
"""Assumed latency of passing a few bytes to the next device, including the kernels that process them."""

BYTES_PER_SECOND = 50e9
"""Assumed bandwidth between devices of two machines: a 400 Gb/s adapter per device. Links between the devices of a
machine are assumed to be as fast as its adapters together."""

MAX_GATHERED_BYTES = 2**28
"""Bytes of gathered states that a process may hold."""

MAX_PARTS = 16
"""Parts of a message; more gain little."""


def shards_per_machine(ranks: Iterable[int], machine_size: int) -> int:
    """Least number of a group's ranks on one machine. machine_size: processes of each, which have adjacent ranks."""
    return min(Counter(rank // machine_size for rank in ranks).values())


def choose_method(size: int, message_bytes: int, per_machine: int = 1) -> ExchangeMethod:
    """The faster exchange between P shards, A = `per_machine` of them on each machine, by a model of the network.

    An all-gather of messages of S bytes takes one hop and (P - 1) S / (A w) seconds: what a machine receives comes in
    through the adapters of its A devices at once. A ring passes a message on in K parts, over P - 1 hops one after the
    other: those between two machines take s = hop + S / (K w), through one adapter, those within one f = hop + S / (K A
    w). The last part follows K - 1 of the slowest hops behind the first. With A = 1 that is (P + K - 2) s.

    Both grow with P; with A = 1 the ring wins if S bytes take longer than a hop, from about 3 MB on (16 key heads with
    F = D = 128 have 1 MB), with A = 2 from 9 MB on, and with A = 8 never. But an all-gather holds P states: beyond
    MAX_GATHERED_BYTES, the ring is used.
    """
    if size * message_bytes > MAX_GATHERED_BYTES:
        return "ring"
    together = BYTES_PER_SECOND * per_machine
    gather = HOP_SECONDS + (size - 1) * message_bytes / together
    count = ring_parts(size, message_bytes)
    between, within = (HOP_SECONDS + message_bytes / count / speed for speed in (BYTES_PER_SECOND, together))
    crossings = math.ceil(size / per_machine) - 1
    slowest = between if crossings else within
    ring = crossings * between + (size - 1 - crossings) * within + (count - 1) * slowest
    return "gather" if gather <= ring else "ring"


def ring_parts(size: int, message_bytes: int) -> int:
    """The K that minimizes (P + K - 2) (hop + S / (K w))."""
    best = math.sqrt(max(0, size - 2) * message_bytes / (BYTES_PER_SECOND * HOP_SECONDS))
    return min(MAX_PARTS, max(1, round(best)))
