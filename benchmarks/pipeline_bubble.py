"""Counts how long pipeline stages wait for each other: python -m benchmarks.pipeline_bubble

Prints a table for `docs/scaling.md`. A stage's operations run in the order of its schedule, each as soon as those that
it depends on have ended: 1F1B and DualPipeV as the installed DeepSpeed yields them, interleaved 1F1B in the order of
Megatron-core's `forward_backward_pipelining_with_interleaving`. A backward takes twice as long as a forward, messages
no time. Nothing runs, so this is a bound: what stages wait besides, for messages and unequal layers, is not in it.
"""

from collections.abc import Iterator
from typing import NamedTuple

from deepspeed.runtime.pipe.schedule import BackwardPass, DualPipeVSchedule, ForwardPass, TrainSchedule

from benchmarks.page import docstring_parser

STAGES = (2, 4, 8, 16)
"""Pipeline ranks p."""

MICRO_BATCHES = (2, 4, 8)
"""Micro-batches of a step, in multiples of p."""


class Pass(NamedTuple):
    """A micro-batch's forward or backward through a chunk of layers; chunks are numbered in the order of the layers."""

    backward: bool
    chunk: int
    micro_batch: int


def one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> Iterator[Pass]:
    """DeepSpeed's `TrainSchedule`."""
    schedule = TrainSchedule(micro_batches, ranks, rank)
    counts = [0, 0]
    for command in (command for step in schedule.steps() for command in step):
        if isinstance(command, ForwardPass | BackwardPass):
            backward = isinstance(command, BackwardPass)
            yield Pass(backward, rank, counts[backward])
            counts[backward] += 1


def dual_pipe_v(rank: int, ranks: int, micro_batches: int) -> Iterator[Pass]:
    """DeepSpeed's `DualPipeVSchedule`: a rank has one chunk on the way out, and one on the way back."""
    schedule = DualPipeVSchedule(micro_batches, ranks, rank)
    for command in (command for step in schedule.steps() for command in step):
        if isinstance(command, ForwardPass | BackwardPass):
            chunk = 2 * ranks - 1 - rank if command.phase else rank
            yield Pass(isinstance(command, BackwardPass), chunk, command.buffer_id % micro_batches)


def interleaved(chunks: int, rank: int, ranks: int, micro_batches: int) -> Iterator[Pass]:
    """Megatron-core's order with `chunks` chunks a rank: micro-batches in groups of `ranks`, chunk after chunk."""
    total = micro_batches * chunks
    warmup = min(total, 2 * (ranks - rank - 1) + (chunks - 1) * ranks)

    def passes(backward: bool) -> Iterator[Pass]:
        for index in range(total):
            group, place = divmod(index, ranks * chunks)
            chunk, within = divmod(place, ranks)
            chunk = chunks - 1 - chunk if backward else chunk
            yield Pass(backward, chunk * ranks + rank, group * ranks + within)

    forwards, backwards = passes(False), passes(True)
    for _ in range(warmup):
        yield next(forwards)
    for forward in forwards:
        yield forward
        yield next(backwards)
    yield from backwards


def idle_share(orders: list[list[Pass]], micro_batches: int) -> float:
    """The share of the step in which a rank waits; orders: of each rank."""
    chunks = 1 + max(each.chunk for order in orders for each in order)
    per_rank = chunks // len(orders)
    ends: dict[Pass, float] = {}
    free, places = [0.0] * len(orders), [0] * len(orders)
    while any(place < len(order) for place, order in zip(places, orders)):
        before = list(places)
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                now = order[places[rank]]
                needed = dependencies(now, chunks)
                if any(each not in ends for each in needed):
                    break
                start = max([free[rank], *(ends[each] for each in needed)])
                free[rank] = ends[now] = start + (2 if now.backward else 1) / per_rank
                places[rank] += 1
        assert places != before, "the schedule has a deadlock"
    return 1 - 3 * micro_batches / max(free)


def dependencies(now: Pass, chunks: int) -> list[Pass]:
    """The passes whose results a pass reads."""
    if not now.backward:
        return [now._replace(chunk=now.chunk - 1)] if now.chunk else []
    forward = now._replace(backward=False)
    return [forward, now._replace(chunk=now.chunk + 1)] if now.chunk < chunks - 1 else [forward]


def shares(ranks: int, micro_batches: int) -> list[float]:
    """Idle shares of 1F1B, interleaved 1F1B with 2 and 4 chunks a rank, and DualPipeV."""
    sizes = (ranks, micro_batches)
    orders = [
        [list(one_forward_one_backward(rank, *sizes)) for rank in range(ranks)],
        *([list(interleaved(chunks, rank, *sizes)) for rank in range(ranks)] for chunks in (2, 4)),
        [list(dual_pipe_v(rank, *sizes)) for rank in range(ranks)],
    ]
    return [idle_share(order, micro_batches) for order in orders]


def main() -> None:
    docstring_parser(__doc__).parse_args()
    print("| stages | micro-batches | 1F1B | 2 chunks | 4 chunks | DualPipeV |")
    print("|---|---|---|---|---|---|")
    for ranks in STAGES:
        for times in MICRO_BATCHES:
            cells = (f"{share:.1%}" for share in shares(ranks, times * ranks))
            print(f"| {ranks} | {times * ranks} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
