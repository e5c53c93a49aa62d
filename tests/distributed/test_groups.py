"""The process groups of a run: those that are used, each built by one call for the whole axis."""

from collections import Counter
from contextlib import contextmanager
from unittest.mock import patch

import deepspeed
import pytest
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.real_runs import random_batch
from megakernel.config import Parallel
from megakernel.model.settings import model_settings
from megakernel.parallel import mesh as mesh_of
from megakernel.parallel.device import prepare_device
from megakernel.parallel.mesh import Mesh
from megakernel.parallel.processes import ProcessEnvironment
from megakernel.training.engine import Engine
from tests.distributed.processes import cpu_mesh, run_ranks

from ..unit.config import trees


@contextmanager
def fake_mesh(world_size, rank, sizes):
    """The mesh of one rank of a large job, whose groups do not communicate."""
    start = dist.init_process_group
    process = ProcessEnvironment(rank, world_size, rank % 8, 8)
    with (
        patch.object(mesh_of, "connect_store", lambda *_: FakeStore()),
        patch.object(dist, "init_process_group", lambda _, **options: start("fake", **options)),
    ):
        mesh = Mesh.create(Parallel(**sizes), process, prepare_device("cpu", 0))
    yield mesh
    mesh.destroy()


@contextmanager
def counted_calls():
    """Counts calls that build groups; with NCCL every rank of the job takes part in each."""
    calls = Counter()

    def counting(name, build):
        def call(*args, **options):
            calls[name] += 1
            return build(*args, **options)

        return call

    with patch.object(dist, "new_group", counting("new_group", dist.new_group)):
        yield calls


def counts(world_size, sizes):
    """Of the first, a middle and the last rank: calls that build groups, and the groups of the rank."""
    found = []
    for rank in (0, world_size // 2 + 1, world_size - 1):
        with counted_calls() as calls, fake_mesh(world_size, rank, sizes) as mesh:
            if mesh.pp.size > 1:  # DeepSpeed's pipeline builds a grid of groups, and one of the world
                PipelineParallelGrid(topology=mesh.topology)
                deepspeed.comm.new_group(ranks=range(world_size))
            found.append((calls.total(), len(distributed_c10d._world.pg_map)))
    return found


LAYOUTS = {
    "data": ({}, ["gradient", "one rank"]),
    "tensor": ({"tensor": 4}, ["tp", "gradient", "one rank"]),
    "tensor, context": ({"tensor": 2, "context": 2}, ["tp", "cp", "states", "gradient", "one rank"]),
    "pipeline": ({"pipeline": 4}, ["pp", "model", "gradient", "one rank"]),
    "all": ({"tensor": 2, "context": 2, "pipeline": 2}, ["tp", "cp", "states", "pp", "model", "gradient"]),
}
"""Sizes, and the groups of a rank besides the world."""


@pytest.mark.parametrize("world_size", [8, 128])
@pytest.mark.parametrize("name", LAYOUTS)
def test_one_call_per_axis_builds_the_groups_of_any_number_of_ranks(name, world_size):
    sizes, groups = LAYOUTS[name]
    [found] = run_ranks(counts, 1, world_size, sizes)
    assert found == [(len(groups), 1 + len(groups))] * 3


@contextmanager
def asked_of_nccl(world_size, sizes):
    """A rank's mesh, and the growing list of what it asks of NCCL, which splits the world's communicator."""
    asked = []

    def split(split_ranks, **options):
        asked.append(split_ranks)
        own = next((line for line in split_ranks if dist.get_rank() in line), None)
        return own and dist.new_group(own, use_local_synchronization=True)

    with (
        patch.object(dist, "get_backend", lambda: "nccl"),
        patch.object(dist, "split_group", split),
        fake_mesh(world_size, 3, sizes) as mesh,
    ):
        yield mesh, asked


def splits(world_size, sizes):
    """The splits of a run whose first and last stage share an embedding, and the number of the rank's groups."""
    with asked_of_nccl(world_size, sizes) as (mesh, asked):
        mesh.build_ends()
        return asked, len(distributed_c10d._world.pg_map)


def test_an_nccl_communicator_is_split_into_all_groups_of_an_axis_at_once():
    [(asked, groups)] = run_ranks(splits, 1, 32, {"tensor": 2, "context": 2, "pipeline": 4})
    *axes, ends = asked
    assert len(axes) == 6
    assert groups == 1 + 6 + 1  # the world, the axes, and the ends, of which this rank is one
    for lines in axes:
        assert sorted(rank for line in lines for rank in line) == list(range(32))
        assert all(line == sorted(line) for line in lines)
    assert ends == [[rank, rank + 24] for rank in range(8)]


def splits_for_key_heads(world_size, sizes):
    """What a rank asks of NCCL for layers of each number of key heads, and its own tensor ranks of a key head."""
    with asked_of_nccl(world_size, sizes) as (mesh, asked):
        axes = len(asked)
        found = {heads: mesh.copies(heads) for heads in (1, 2, 4, 8, 2)}
        return asked[axes:], {heads: axis and axis.ranks for heads, axis in found.items()}


def test_the_tensor_ranks_of_a_key_head_get_a_group_where_several_have_it():
    [(asked, ranks)] = run_ranks(splits_for_key_heads, 1, 16, {"tensor": 4, "context": 2})
    assert ranks == {1: (0, 1, 2, 3), 2: (2, 3), 4: None, 8: None}
    assert asked == [[[rank, rank + 1] for rank in range(0, 16, 2)]]


def groups_added_by_training(sizes):
    with cpu_mesh(**sizes) as mesh:
        before = len(distributed_c10d._world.pg_map)
        model, training = {"num_layers": 6, "tie_embeddings": True}, {"global_batch_size": 6}
        config = trees.config(model=model, training=training, parallel=sizes)
        engine = Engine(config, model_settings(config, mesh, 64))
        engine.train_step([random_batch(config, 64, mesh)] * engine.micro_batches, 1e-3)
        return len(distributed_c10d._world.pg_map) - before


@pytest.mark.second
@pytest.mark.parametrize(
    ("sizes", "ranks", "added"),
    [
        ({"zero_stage": 1}, 2, 0),
        pytest.param({"zero_stage": 3}, 2, 0, marks=pytest.mark.second),
        pytest.param({"pipeline": 2}, 2, 0, marks=pytest.mark.second),
        # Tied embeddings: one more of the first and the last stage, in which the stages between them are not.
        pytest.param({"pipeline": 3}, 3, [1, 0, 1], marks=pytest.mark.second),
    ],
    ids=str,
)
def test_training_adds_no_groups_to_those_of_the_mesh(sizes, ranks, added):
    assert run_ranks(groups_added_by_training, ranks, sizes) == (added or [0] * ranks)
