"""The mesh: Megatron-core and DeepSpeed agree on its ranks and groups."""

import itertools
import os
import resource
import signal
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from megatron.core.parallel_state import RankGenerator

from megakernel.config import Parallel, UserError
from megakernel.parallel import replicated
from megakernel.parallel.mesh import Mesh
from megakernel.parallel.processes import ProcessEnvironment
from megakernel.parallel.ranks import Ranks
from megakernel.parallel.rendezvous import connect_store
from tests.distributed.processes import RankFailedError, cpu_mesh, run_ranks, this_process

LAYOUTS = [
    {},
    {"tensor": 2},
    {"context": 2},
    {"pipeline": 2},
    {"tensor": 2, "context": 2},
    {"tensor": 2, "pipeline": 2},
]


def test_megatron_and_deepspeed_order_ranks_alike():
    for tp, cp, dp, pp in itertools.product((1, 2, 3), repeat=4):
        megatron = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
        deepspeed = PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=dp * cp)
        for axes, axis in (("tp", "model"), ("dp-cp", "data"), ("pp", "pipe")):
            assert sorted(megatron.get_ranks(axes)) == sorted(deepspeed.get_axis_comm_lists(axis)), (
                tp,
                cp,
                dp,
                pp,
            )


def groups(sizes):
    with cpu_mesh(**sizes) as mesh:
        axes = {name: getattr(mesh, name) for name in ("tp", "cp", "dp", "pp", "gradient", "model")}
        ranks = {name: axis.ranks for name, axis in axes.items()}
        assert all(axis.ranks[axis.rank] == mesh.rank for axis in axes.values())
        return ranks, mesh.is_first_stage, mesh.is_last_stage


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_process_groups_are_the_lines_of_the_grid_of_ranks(sizes):
    grid = torch.arange(8).view(sizes.get("pipeline", 1), -1, sizes.get("context", 1), sizes.get("tensor", 1))
    for rank, (ranks, first, last) in enumerate(run_ranks(groups, 8, sizes)):
        p, d, c, t = (grid == rank).nonzero()[0].tolist()
        assert ranks["tp"] == tuple(grid[p, d, c, :].tolist())
        assert ranks["cp"] == tuple(grid[p, d, :, t].tolist())
        assert ranks["dp"] == tuple(grid[p, :, c, t].tolist())
        assert ranks["pp"] == tuple(grid[:, d, c, t].tolist())
        assert ranks["gradient"] == tuple(grid[p, :, :, t].flatten().tolist())
        assert ranks["model"] == tuple(grid[:, d, c, :].flatten().tolist())
        assert (first, last) == (p == 0, p == len(grid) - 1)


def sums_and_maximum():
    with cpu_mesh(tensor=2) as mesh:
        own = torch.tensor(float(mesh.rank))
        return (
            mesh.sum(own, mesh.tp).item(),
            mesh.sum(own, mesh.gradient).item(),
            mesh.all_reduce_max(mesh.rank == 3, -mesh.rank),
            own.item(),
        )


def test_a_sum_runs_over_one_axis_and_the_maximum_over_the_world():
    assert run_ranks(sums_and_maximum, 4) == [
        (1, 2, [1, 0], 0),
        (1, 4, [1, 0], 1),
        (5, 2, [1, 0], 2),
        (5, 4, [1, 0], 3),
    ]


def replicated_gradients():
    with cpu_mesh(tensor=2) as mesh:
        shared = torch.ones(3, requires_grad=True)
        own = torch.ones(3, requires_grad=True)
        head = torch.arange(3.0) + mesh.tp.rank
        (replicated(shared, mesh.tp.group) * head + replicated(own, None) * head).sum().backward()
        return shared.grad.tolist(), own.grad.tolist()


def test_replicated_parameters_get_the_summed_gradient_of_all_tensor_ranks():
    assert run_ranks(replicated_gradients, 2) == [([1, 3, 5], [0, 1, 2]), ([1, 3, 5], [1, 2, 3])]


def added_open_files(world_size: int):
    """By how much serving the store of so many ranks raises the limit of open files, 1,000 below the hard limit."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit - 1000, hard_limit))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    store = connect_store(
        ProcessEnvironment(world_size=world_size, master_port=port), timedelta(seconds=10), wait=False
    )
    store.set("here", "rank 0")
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - (hard_limit - 1000)


def test_serving_the_store_raises_the_file_limit_by_two_per_rank():
    assert run_ranks(added_open_files, 1, 300) == [600]
    assert run_ranks(added_open_files, 1, 8192) == [1000], "not above the hard limit"


def results_of_rank_zero():
    with cpu_mesh() as mesh:
        ranks = Ranks.of(mesh)
        result = ranks.on_rank_zero(lambda: {"rank": mesh.rank, "names": ["a"] * 1000})
        try:
            ranks.on_rank_zero(lambda: int("no number"))
        except ValueError as error:
            return result["rank"], len(result["names"]), str(error)


def test_the_result_or_error_of_rank_zero_reaches_all_ranks():
    outcomes = run_ranks(results_of_rank_zero, 3)
    assert outcomes == [(0, 1000, "invalid literal for int() with base 10: 'no number'")] * 3


def test_a_world_size_that_does_not_divide_is_refused_before_it_starts():
    with pytest.raises(UserError, match=r"parallel\.tensor=2 .* does not divide 6 .* a multiple of 4"):
        Mesh.create(Parallel(tensor=2, pipeline=2), ProcessEnvironment(world_size=6), torch.device("cpu"))


def fail_on_one_rank():
    with cpu_mesh(tensor=2) as mesh:
        if mesh.rank == 1:
            raise RuntimeError("the reason")
        dist.barrier()


def test_run_ranks_raises_the_first_failure_and_ends_the_other_ranks():
    with pytest.raises(RankFailedError, match=r"rank 1 raised(.|\n)*the reason"):
        run_ranks(fail_on_one_rank, 2)


def die_after_the_error_of_a_peer():
    if this_process().rank == 1:
        raise ConnectionError("connection closed by peer")
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def test_run_ranks_raises_the_death_of_a_rank_rather_than_the_error_of_its_peer():
    with pytest.raises(RankFailedError, match="rank 0 died with exit status -9"):
        run_ranks(die_after_the_error_of_a_peer, 2)
