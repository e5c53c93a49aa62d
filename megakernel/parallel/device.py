"""Which device this process computes on, and the one place that answers for machines without CUDA.

Megatron-core asks `torch.cuda.current_device()` wherever it allocates, and DeepSpeed compiles a shared-memory
collective when its CPU backend starts. `prepare_device` settles both once per process that trains, before the first
model is built; no other file changes a library.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import psutil
import torch

from megakernel.config import UserError


def choose_device(kind: Literal["auto", "cpu", "cuda"], local_rank: int = 0) -> torch.device:
    """The device of this process, which is PyTorch's from here on; all that a process needs which does not train.

    `auto` takes CUDA where there is a device. `local_rank`, counted over this machine's processes, is the
    index of the CUDA device.

    Raises:
        UserError: training.device is cuda and this process has no CUDA device of its own.
    """
    quieten_libraries()  # an index of samples, too, is made by one of them
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    _check_cuda_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def prepare_device(kind: Literal["auto", "cpu", "cuda"], local_rank: int) -> torch.device:
    """`choose_device`, and make Megatron-core and DeepSpeed use it.

    Best called before they are imported, which takes seconds, and when they warn.
    """
    device = choose_device(kind, local_rank)
    os.environ["DS_ACCELERATOR"] = device.type
    # Both libraries read these from the environment, which is empty when no launcher started the process.
    os.environ.setdefault("LOCAL_RANK", str(local_rank))
    # Megatron overlaps collectives with matrix products; one connection keeps the order they were queued in.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if device.type == "cpu":
        _answer_for_cuda(device)
    _choose_deepspeed_accelerator(device.type)
    _share_one_random_stream()
    return device


def free_memory(device: torch.device) -> int:
    """Bytes that are free there, on a CPU those of the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free: int = psutil.virtual_memory().available
    return free


_OUT_OF_MEMORY = ("out of memory", "allocate memory", "ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory, of the host or of a device, is full: libraries raise many types for it."""
    is_told = any(words in str(error) for words in _OUT_OF_MEMORY)
    return is_told or isinstance(error, MemoryError | torch.OutOfMemoryError)


def quieten_ranks(rank: int) -> None:
    """Keep both libraries' warnings on rank 0 only; errors are shown by every rank."""
    if rank != 0:
        warnings.filterwarnings("ignore", module=r"(megatron|deepspeed)\.")
        for name in ("DeepSpeed", "megatron"):
            logging.getLogger(name).setLevel(logging.ERROR)


def _check_cuda_device(local_rank: int) -> None:
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"training.device=cuda: local rank {local_rank} needs CUDA device {local_rank} and this machine "
            f"shows {count}; start one process per device, or set training.device=cpu"
        )


_NOISE = (
    "Transformer Engine and Apex are not installed",
    "full scope is deprecated",  # of a CUDA graph that nobody asked for
    r"`torch\.distributed\.\w+` is deprecated",  # called by the libraries themselves
    "c10d::broadcast_: an autograd kernel was not registered",  # DeepSpeed's, of tied weights before the first step
)


def quieten_libraries() -> None:
    """Keep what Megatron-core and torch warn of when they are imported, and nobody can change, off the console."""
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=message)


@contextmanager
def _nothing_compiled() -> Iterator[None]:
    # Megatron-core hands functions that nothing here calls to torch's compiler, which takes a second to load.
    compiled = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiled


def _answer_for_cuda(device: torch.device) -> None:
    torch.cuda.current_device = lambda: device  # type: ignore[assignment, return-value]
    import deepspeed.ops

    # Asked once, when the CPU backend starts: an op that is not listed is not compiled.
    deepspeed.ops.__compatible_ops__ = {}


def _choose_deepspeed_accelerator(kind: str) -> None:
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    # DeepSpeed may have been imported, and have chosen, before this process knew its device.
    if kind == "cpu" and get_accelerator().device_name() != "cpu":
        set_accelerator(CPU_Accelerator())


def _share_one_random_stream() -> None:
    # Megatron's per-rank streams live in CUDA state; weights are drawn whole and then cut, so none is needed.
    with _nothing_compiled():
        from megatron.core.tensor_parallel.random import initialize_rng_tracker

    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
