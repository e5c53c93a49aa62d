"""All libraries in a process use one device; a machine without CUDA needs no compiler."""

import os

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch.distributed import HashStore

from megakernel.config import Parallel, UserError
from megakernel.parallel import Mesh, prepare_device
from megakernel.parallel.device import choose_device, claim_device
from megakernel.parallel.processes import ProcessEnvironment
from tests.distributed.processes import cpu_mesh, run_ranks


def run_without_launcher():
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    mesh = Mesh.create(Parallel(), ProcessEnvironment(), prepare_device("auto", 0))
    model = torch.nn.Linear(2, 2)
    deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}},
        mpu=mesh.mpu,
    )
    mesh.destroy()
    return mesh.world_size, mesh.device.type, torch.distributed.is_initialized()


def test_a_process_without_a_launcher_has_world_size_one():
    assert run_ranks(run_without_launcher, 1) == [(1, "cpu", False)]


def without_compiler(extensions):
    os.environ |= {"PATH": "", "CXX": "/nonexistent", "TORCH_EXTENSIONS_DIR": str(extensions)}
    with cpu_mesh(tensor=2) as mesh:
        rows = torch.full((1, 2), float(mesh.rank))
        gathered = gather_from_sequence_parallel_region(rows, group=mesh.tp.group)
        return get_accelerator().device_name(), gathered.tolist()


def test_collectives_of_megatron_and_deepspeed_need_no_compiler(tmp_path):
    assert run_ranks(without_compiler, 2, tmp_path) == [("cpu", [[0, 0], [1, 1]])] * 2
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_missing_cuda_device_is_refused_with_a_remedy():
    with pytest.raises(UserError, match=r"training\.device=cuda: .* sees 0; .* set training\.device=cpu"):
        prepare_device("cuda", 0)


@pytest.fixture
def visible(monkeypatch):
    """Pretends that this process sees some CUDA devices; returns a function that sets their number."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return lambda count: monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_a_process_that_sees_one_device_takes_it_whatever_its_local_rank(visible):
    """As under `--gpus-per-task=1`, where Slurm shows each task its own device, as number 0."""
    visible(1)
    assert [choose_device("auto", rank).index for rank in (0, 3)] == [0, 0]
    visible(4)
    assert [choose_device("cuda", rank).index for rank in (0, 3)] == [0, 3]
    visible(2)
    with pytest.raises(UserError, match="local rank 3 needs CUDA device 3 and this process sees 2"):
        choose_device("cuda", 3)


def test_two_processes_of_a_machine_do_not_share_a_device():
    store = HashStore()
    for host, device in (("n1", "GPU-1"), ("n1", "GPU-2"), ("n2", "GPU-1")):
        claim_device(store, host, device)
    with pytest.raises(
        UserError, match="processes of n1 see one GPU alone, GPU-2; start one process per GPU"
    ):
        claim_device(store, "n1", "GPU-2")


def hardware_queues(*sizes):
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    prepare_device("cpu", 0, *sizes)
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")


@pytest.mark.parametrize(("sizes", "queues"), [((1, 1), None), ((2, 1), "1"), ((2, 2), None), ((1, 2), None)])
def test_tensor_ranks_have_one_hardware_queue_unless_states_are_exchanged(sizes, queues):
    """In one queue, a ring's hops, which wait for other ranks, would hold up this rank's own kernels."""
    assert run_ranks(hardware_queues, 1, *sizes) == [queues]
