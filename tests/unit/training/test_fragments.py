"""What two fragments of a tensor share, for any two layouts."""

import itertools
import random

import pytest
import torch

from megakernel.checkpoint.fragments import WHOLE, Fragment
from megakernel.parallel.partition import Partition
from tests.unit.parallel.test_partition import CASES


def fragments(partition, ranks, shape, draw, most):
    """Fragments that are the whole tensor once: shards, or random ranges of each flattened shard."""
    for rank in range(0, ranks, partition.copies):
        shard = Fragment(partition, rank, ranks)
        numel = torch.Size(shard.shape(shape)).numel()
        cuts = [0, *sorted(draw.choices(range(numel + 1), k=draw.randrange(most))), numel]
        ranges = [range(*pair) for pair in itertools.pairwise(cuts)]
        yield from map(shard.narrowed, ranges) if most > 1 else [shard]


def layouts(partition, shape):
    """How a layout with more, and one with fewer tensor ranks may partition the tensor."""
    yield partition, 4
    yield Partition(None), 1
    yield Partition(None), 4
    if not partition.parts and partition.dimension is not None and partition.copies == 1:
        yield partition, 2
    yield Partition(len(shape) - 1), 1


@pytest.mark.parametrize("name", CASES)
def test_fragments_of_any_layout_are_put_together_from_those_of_any_other(name):
    partition, shape = CASES[name]
    whole = torch.rand(shape)
    draw = random.Random(name)
    for written, read in itertools.product(layouts(partition, shape), repeat=2):
        sources = list(fragments(*written, shape, draw, most=6))
        if written[0].dimension is None:  # every rank has it
            sources = [source for source in sources if source.rank == 0]
        for target in fragments(*read, shape, draw, most=draw.choice([1, 6])):
            numel = torch.Size(target.shape(shape)).numel()
            flat, copied = torch.full((numel,), torch.nan), 0
            for source in sources:
                stored = source.of(whole).flatten()
                places = torch.arange(len(stored))
                for shared in target.shared_with(source, shape):
                    shared.copy(flat, stored)
                    taken = shared.of(places)
                    assert shared.source_span == range(int(taken.min()), int(taken.max()) + 1)
                    copied += shared.of(stored).numel()
            assert torch.equal(flat.view(target.shape(shape)), target.of(whole))
            assert copied == numel, "each element is read once"


def test_a_range_of_a_matrix_is_at_most_three_boxes():
    matrix = 7, 5
    for start, stop in itertools.combinations(range(36), 2):
        boxes = list(Fragment(Partition(None), flat=range(start, stop)).boxes(matrix))
        assert len(boxes) <= 3
        numbers = torch.arange(35).view(matrix)
        of = [numbers[tuple(slice(r.start, r.stop) for r in box.ranges)].flatten() for box in boxes]
        assert torch.cat(of).tolist() == list(range(start, stop))


def test_a_number_is_a_fragment_too():
    assert len(WHOLE.shared_with(Fragment(Partition(None), flat=range(1)), ())) == 1
    assert WHOLE.shared_with(Fragment(Partition(None), flat=range(1, 1)), ()) == []
