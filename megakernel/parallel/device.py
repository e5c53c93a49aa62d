"""The device of this process, and the patches that let Megatron-core and DeepSpeed run without CUDA.

Megatron-core calls `torch.cuda.current_device()` wherever it allocates, and DeepSpeed compiles an op when its CPU
backend starts. `prepare_device` patches both before the first model is built; no other file patches a module.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import psutil
import torch
import torch.distributed as dist

from megakernel.config import UserError


def choose_device(kind: Literal["auto", "cpu", "cuda"], local_rank: int = 0) -> torch.device:
    """Select and return the device of this process. Enough for processes that do not train.

    `auto` takes CUDA if available. `local_rank`: counted over this machine's processes; see `cuda_index`.

    Raises:
        UserError: there is no CUDA device for this process.
    """
    silence_libraries()  # here, since processes that only build a sample index import Megatron-core too
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        _check_backend_for_cpu()
        return torch.device("cpu")
    device = torch.device("cuda", cuda_index(local_rank))
    torch.cuda.set_device(device)
    return device


def _check_backend_for_cpu() -> None:
    if os.environ.get("MEGAKERNEL_BACKEND") != "triton":
        return
    from megakernel.ops.kernels.launch import unsupported_device

    if unsupported_device(torch.device("cpu")) is not None:
        raise UserError(
            "MEGAKERNEL_BACKEND=triton needs a GPU, and this process computes on the CPU; unset it, or set "
            "TRITON_INTERPRET=1 for Triton's interpreter, which is slow"
        )


def has_bfloat16_products(device: torch.device) -> bool:
    """Whether the device multiplies matrices in bfloat16; a CPU without AVX-512 converts every element instead."""
    if device.type != "cpu":
        return True
    # The question that torch's own compiler asks; torch has no public one.
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def cuda_index(local_rank: int) -> int:
    """Index of the CUDA device of this process: its local rank, or 0 if it sees only one device.

    Launchers may show each process its own device, as Slurm does under `--gpus-per-task=1`; CUDA then calls it 0.

    Raises:
        UserError: the process sees no device, or several but too few.
    """
    count = torch.cuda.device_count()
    if count == 1:
        return 0
    if local_rank >= count:
        raise UserError(
            f"training.device=cuda: local rank {local_rank} needs CUDA device {local_rank} and this process sees "
            f"{count}; start one process per device, show each process its own, or set training.device=cpu"
        )
    return local_rank


def claim_device(store: dist.Store, host: str, device: str) -> None:
    """Record that a process of `host` computes on `device`, the device's unique id, which no other process may.

    Raises:
        UserError: another process of the host has claimed it; NCCL would end with `invalid usage`.
    """
    if store.add(f"device/{host}/{device}", 1) > 1:
        raise UserError(
            f"processes of {host} see one GPU alone, {device}; start one process per GPU (--nproc 1), or show each "
            "process its own (CUDA_VISIBLE_DEVICES, Slurm's --gpus-per-task=1)"
        )


def prepare_device(
    kind: Literal["auto", "cpu", "cuda"], local_rank: int, tensor_ranks: int = 1, context_ranks: int = 1
) -> torch.device:
    """`choose_device`, and configure Megatron-core and DeepSpeed for it and for tensor parallelism over `tensor_ranks`.

    Best called before they are imported, which takes seconds and emits warnings.
    """
    if tensor_ranks > 1 and context_ranks == 1:
        # Megatron-core starts collectives before the matrix products that should hide them, and only one connection
        # keeps this order. Not with context ranks: `PointToPoint` queues all hops of a ring at once, and in the only
        # queue a rank's own work would wait behind receipts from ranks that have not sent yet. CUDA reads the variable
        # when `choose_device` creates its context.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    device = choose_device(kind, local_rank)
    os.environ["DS_ACCELERATOR"] = device.type
    # Both libraries read it as the device's index; it is not set unless a launcher started the process.
    os.environ["LOCAL_RANK"] = str(local_rank if device.index is None else device.index)
    if device.type == "cpu":
        _patch_for_cpu(device)
    _choose_deepspeed_accelerator(device.type)
    _initialize_rng_tracker()
    return device


def free_memory(device: torch.device) -> int:
    """Free bytes of the device, or of the host's memory for a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_memory()


_CGROUPS, _OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def free_host_memory() -> int:
    """Bytes of host memory that this process may still use: of the machine, and of its job's limits (cgroup v2)."""
    free: int = psutil.virtual_memory().available
    try:
        own = _OWN_CGROUP.read_text().rpartition("0::")[2].splitlines()[0]
    except (OSError, IndexError):
        return free
    group = _CGROUPS / own.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(_CGROUPS):
            break
        with suppress(OSError, ValueError):  # the root has no limit, and `max` is none
            limit = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text())
            fields = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cached = sum(int(size) for name, size in fields if name in ("active_file", "inactive_file"))
            free = min(free, limit - used + cached)
    return free


_OUT_OF_MEMORY = ("out of memory", "allocate memory", "ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that host or device memory is exhausted; libraries raise various types."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(text in str(error) for text in _OUT_OF_MEMORY)


def silence_other_ranks(rank: int) -> None:
    """Show Megatron-core's and DeepSpeed's warnings on rank 0 only; every rank shows errors."""
    if rank != 0:
        warnings.filterwarnings("ignore", module=r"(megatron|deepspeed)\.")
        for name in ("DeepSpeed", "megatron"):
            logging.getLogger(name).setLevel(logging.ERROR)


_IGNORED_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "When using .* CUDA_DEVICE_MAX_CONNECTIONS",  # `prepare_device` sets it where CUDA reads it
    "full scope is deprecated",  # of Megatron-core's CUDA graphs, which are not used
    r"`torch\.distributed\.\w+` is deprecated",  # called by the libraries themselves
    "c10d::broadcast_: an autograd kernel was not registered",  # DeepSpeed broadcasts tied weights at the start
)


_UNTESTED = "using ZeRO with an untested optimizer"
"""A line of DeepSpeed about Muon, which is ours and not in its list; tests compare its layouts."""


def silence_libraries() -> None:
    """Hide warnings of Megatron-core, DeepSpeed and torch that users can do nothing about."""
    for message in _IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("DeepSpeed").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return _UNTESTED not in record.getMessage()


@contextmanager
def _without_torch_compile() -> Iterator[None]:
    # On import Megatron-core passes functions to torch.compile that are never called here; that takes a second.
    compiled = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiled


def _patch_for_cpu(device: torch.device) -> None:
    torch.cuda.current_device = lambda: device  # type: ignore[assignment, return-value]
    import deepspeed.ops

    # Read once, when the CPU backend starts: an op that is not listed is not compiled.
    deepspeed.ops.__compatible_ops__ = {}


def _choose_deepspeed_accelerator(kind: str) -> None:
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    # DeepSpeed may have been imported, and have chosen its accelerator, before the device was known.
    if kind == "cpu" and get_accelerator().device_name() != "cpu":
        set_accelerator(CPU_Accelerator())


def _initialize_rng_tracker() -> None:
    # Megatron-core's per-rank generators need CUDA. None is needed: weights are drawn whole and then partitioned.
    with _without_torch_compile():
        from megatron.core.tensor_parallel.random import initialize_rng_tracker

    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
