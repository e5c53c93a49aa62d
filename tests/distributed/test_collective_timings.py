"""Preflight all-reduces over real processes that stand for nodes, one of which cannot reach the others."""

import os
from datetime import timedelta

import pytest
import torch.distributed as dist

from launch.slurm import collectives
from launch.slurm.slow_nodes import Timing, slow_nodes
from megakernel.parallel.processes import ProcessEnvironment
from tests.distributed.processes import run_ranks

pytestmark = pytest.mark.second

NODES = ["n1", "n1", "n2", "n3"]


def measure(lost: str | None) -> list[Timing]:
    """The timings of this process; `lost`: a node whose network interface does not exist."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    node = NODES[rank]
    if node == lost:
        os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
    collectives.timeout = lambda processes: timedelta(seconds=10 if lost is None else 5)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=60)
    )
    return list(collectives.timings(store, ProcessEnvironment(rank, size), node, mib=1))


@pytest.fixture(scope="module")
def timings():
    return {lost: [one for rank in run_ranks(measure, 4, lost) for one in rank] for lost in (None, "n2")}


def test_each_rank_is_timed_within_its_node_with_two_neighbors_and_with_all(timings):
    groups = [one.nodes for one in timings[None] if one.rank == 0]
    assert groups == [["n1"], ["n1", "n2"], ["n3", "n1"], []], "the last group has all nodes"
    assert all(one.seconds > 0 and one.error is None for one in timings[None])
    assert len(timings[None]) == 2 + 3 + 2 + 3 + 4, "a node with one process has no round within itself"


def test_only_the_unreachable_node_is_reported_as_slow(timings):
    slow = slow_nodes(timings["n2"], limit=60)
    assert list(slow) == ["n2"]
    assert slow["n2"].startswith("an all-reduce with n")
    assert next(one for one in timings["n2"] if one.nodes == ["n3", "n1"]).seconds is not None
