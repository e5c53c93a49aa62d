"""Work in other processes, whose results come back in the order of what was given."""

import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_processes(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    workers: int,
    start: Callable[..., None] | None = None,
    arguments: tuple[Any, ...] = (),
) -> Iterator[Result]:
    """`work(item)` of every item, in order, with a few items per worker under way at a time.

    start: called with `arguments` in each process before its first item.
    """
    pool = ProcessPoolExecutor(
        workers,
        # A forked child could inherit a lock that a reader thread of pyarrow or tokenizers holds.
        mp_context=get_context("spawn"),
        initializer=_begin,
        initargs=(start, arguments),
    )
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(start: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    # Ctrl-C reaches the whole process group; the parent ends the pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if start is not None:
        start(*arguments)
