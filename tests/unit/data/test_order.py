import itertools

import pytest

from data_pipeline.order import ConsumptionOrder, Share, samples_by_pass
from megakernel.config.training import Training


def training(**keys: object) -> Training:
    return Training(**{"steps": 6, "seq_len": 8, "global_batch_size": 12, **keys})


def global_batch(step: int, data_size: int, **keys: object) -> list[int]:
    """The stream indices of a step, from all replicas' micro-batches in the documented order."""
    replicas = [
        ConsumptionOrder(training(**keys).phase_of(step), Share(rank, data_size)).indices(step)
        for rank in range(data_size)
    ]
    return [index for passes in zip(*replicas) for indices in passes for index in indices]


@pytest.mark.parametrize(
    "ranges", [[(5, 9)], [(0, 3)], [(20, 30), (2, 4)], [(5, 9), (7, 12), (9, 10)], [(10, 12), (12, 15)]]
)
def test_exactly_the_skipped_ranges_are_left_out(ranges: list[tuple[int, int]]):
    consumed = [index for step in range(6) for index in global_batch(step, 3, skip_samples=ranges)]
    kept = (i for i in itertools.count() if not any(first <= i < end for first, end in ranges))
    assert consumed == list(itertools.islice(kept, 72))


def test_the_stream_is_longer_by_the_skipped_samples():
    assert ConsumptionOrder(training().phases[0], Share()).stream_length(6) == 72
    skipping = training(skip_samples=[(0, 5), (70, 71)])
    assert ConsumptionOrder(skipping.phases[0], Share()).stream_length(6) == 78


@pytest.mark.parametrize(("count", "data_size", "micro"), [(10, 1, 4), (10, 2, 4), (1, 4, 2), (16, 2, 4)])
def test_replicas_make_equally_many_passes_over_all_samples(count: int, data_size: int, micro: int):
    replicas = [samples_by_pass(count, micro, Share(rank, data_size)) for rank in range(data_size)]
    assert len({len(passes) for passes in replicas}) == 1
    rows = sorted(row for passes in replicas for rows in passes for row in rows)
    assert rows == list(range(len(rows)))
    assert count <= len(rows) < count + data_size * micro
