"""Shards of a tensor on tensor ranks, and the whole tensor that they join to."""

import pytest
import torch

from megakernel.parallel.partition import Partition

CASES = {
    "rows": (Partition(0), (8, 3)),
    "columns": (Partition(1), (3, 8)),
    "two stacked matrices": (Partition(0, stride=2), (16, 3)),
    "replicated": (Partition(None), (5, 3)),
    "a copy on two ranks": (Partition(0, copies=2), (6, 3)),
    "a copy on all ranks": (Partition(0, copies=4), (1, 2, 3)),
    "two groups of rows": (Partition(0, parts=(8, 4, 2)), (28, 3)),
    "one group of rows": (Partition(0, parts=(8, 4, 4)), (16, 3)),
    "a bias of two groups": (Partition(0, parts=(4, 2, 2)), (16,)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_shards_of_four_ranks_join_to_the_whole_tensor(name):
    partition, shape = CASES[name]
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    shards = [partition.shard(whole, rank, 4) for rank in range(4)]
    assert torch.equal(partition.join(shards), whole)
    assert {partition.whole_shape(shard.shape, 4) for shard in shards} == {shape}


def test_two_ranks_share_each_part_of_their_group_and_others_have_none_of_it():
    rows = torch.arange(28)
    shares = [Partition(0, parts=(8, 4, 2)).shard(rows, rank, 4).tolist() for rank in range(4)]
    assert shares[0] == [0, 1, 2, 3, 8, 9, 12]
    assert shares[1] == [4, 5, 6, 7, 10, 11, 13]
    assert sorted(shares[2] + shares[3]) == list(range(14, 28))


def test_of_two_copies_one_counts_in_the_gradient_norm():
    flags = []
    for rank in range(4):
        tensor = torch.zeros(3)
        Partition(0, copies=2).mark(tensor, rank)
        flags.append(tensor.tensor_model_parallel)
        assert Partition.of(tensor) == Partition(0, copies=2)
    assert flags == [True, False, True, False]


def test_a_partition_that_an_earlier_version_recorded_is_read():
    """Files of checkpoints have the dimension and the stride alone."""
    assert Partition(*(0, 2)) == Partition(0, stride=2)
