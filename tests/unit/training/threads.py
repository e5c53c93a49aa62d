"""Several ranks as threads of one process, for tests that need no real collectives."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megakernel.parallel.ranks import Ranks


def on_ranks(size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """Run `work` once per rank; its result or exception, in rank order."""
    slots: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=30)

    def exchange_of(rank: int) -> Callable[[Any], list[Any]]:
        def exchange(value: Any) -> list[Any]:
            slots[rank] = value
            barrier.wait()
            values = list(slots)
            barrier.wait()
            return values

        return exchange

    def outcome(rank: int) -> Any:
        try:
            return work(Ranks(rank, size, exchange_of(rank)))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(outcome, range(size)))
