"""The process groups of a run: one per axis of the mesh, which Megatron-core and DeepSpeed use too.

Both libraries would build their own: Megatron-core's `initialize_model_parallel` each group that a model of experts may
need, DeepSpeed's pipeline a second set of them, and both one group after the other, those of other ranks included. With
NCCL and a bound device every such call is an `ncclCommSplit` of the world's communicator, in which all ranks take part:
`_new_process_group_helper` (torch 2.13, distributed_c10d.py) calls `perform_nocolor_split` where a rank is not in the
new group. So a run of 8,192 ranks would start with 47,131 splits. Here an axis is one call, whatever its size.

Without a bound device there would be no splits, but communicators would be built while the first steps run, each from
an id sent through the store, and one more for each pair of ranks between which single messages are sent.
"""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import deepspeed
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.parallel_state import RankGenerator
from torch import Tensor

from megakernel.config import Parallel

from .axis import Axis

Lines = Sequence[Sequence[int]]
"""World ranks of the groups of one axis: disjoint, each ascending."""


def rank_lines(parallel: Parallel, world_size: int) -> RankGenerator:
    """Megatron-core's order of ranks: `get_ranks("dp-cp")` are the groups that data and context ranks span."""
    return RankGenerator(
        tp=parallel.tensor,
        ep=1,
        dp=world_size // parallel.model_size,
        pp=parallel.pipeline,
        cp=parallel.context,
        order="tp-cp-ep-dp-pp",
    )


class ProcessGroups:
    """Builds the groups of axes, and finds them again by their ranks. Every rank makes the same calls.

    splits: whether the world's backend splits communicators, as NCCL with a bound device does; gloo does not.
    """

    def __init__(self, timeout: timedelta, splits: bool):
        self._timeout = timeout
        self._splits = splits
        self._rank = dist.get_rank()
        self._by_ranks: dict[tuple[int, ...], Any] = {}

    def build(self, lines: Lines, name: str) -> Axis | None:
        """The axis of this rank's line, in a new group; None if this rank is in none of the lines.

        Groups of one rank, which nothing is sent in, are built once.
        """
        own = next((tuple(line) for line in lines if self._rank in line), None)
        if own is not None and len(own) == 1 and own in self._by_ranks:
            return Axis.of(self._by_ranks[own])
        group = self._build(lines, own, name)
        for line in map(tuple, lines):
            self._by_ranks.setdefault(line, group if line == own else dist.GroupMember.NON_GROUP_MEMBER)
        return None if own is None else Axis.of(group)

    def _build(self, lines: Lines, own: tuple[int, ...] | None, name: str) -> Any:
        if self._splits:
            split = [list(line) for line in lines]
            return dist.split_group(split_ranks=split, timeout=self._timeout, group_desc=name)
        if own is None:
            return None
        # Only these ranks build the group.
        return dist.new_group(own, self._timeout, use_local_synchronization=True, group_desc=name)

    def find(self, ranks: Iterable[int]) -> Any:
        """The group of these ranks that was built first, or torch's value for none if this rank is not in it.

        A group that no axis has is built, which takes all ranks.
        """
        key = tuple(sorted(ranks))
        if key not in self._by_ranks:
            is_world = len(key) == dist.get_world_size()
            self._by_ranks[key] = dist.group.WORLD if is_world else dist.new_group(key, self._timeout)
        return self._by_ranks[key]


def lend_to_megatron(tp: Axis, cp: Axis, pp: Axis, gradient: Axis, model: Axis) -> None:
    """Set the state of Megatron-core's `parallel_state` that its layers read.

    Of the groups that are not built, those of experts for instance, Megatron-core says that they are not initialized.
    """
    state = {
        "TENSOR_MODEL_PARALLEL_GROUP": tp.group,
        "TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": list(tp.ranks),
        "CONTEXT_PARALLEL_GROUP": cp.group,
        "CONTEXT_PARALLEL_GLOBAL_RANKS": list(cp.ranks),
        "PIPELINE_MODEL_PARALLEL_GROUP": pp.group,
        "PIPELINE_GLOBAL_RANKS": list(pp.ranks),
        "DATA_PARALLEL_GROUP_WITH_CP": gradient.group,
        "DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": list(gradient.ranks),
        "MODEL_PARALLEL_GROUP": model.group,
        "MODEL_PARALLEL_GLOBAL_RANKS": list(model.ranks),
    }
    if cp.size == 1:
        state |= {"DATA_PARALLEL_GROUP": gradient.group, "DATA_PARALLEL_GLOBAL_RANKS": list(gradient.ranks)}
    for name, value in state.items():
        assert hasattr(parallel_state, f"_{name}"), name
        setattr(parallel_state, f"_{name}", value)
    parallel_state._set_global_memory_buffer()


def lend_to_deepspeed(groups: ProcessGroups, pp: Axis) -> "StageSends":
    """Let DeepSpeed, once it is initialized, find groups instead of building them, and stages exchange in their own.

    DeepSpeed's pipeline sends hidden states in the group of all ranks, in whose communicator they would wait for every
    other exchange. Returns what this stage has sent and not finished.
    """
    backend = deepspeed.comm.comm.cdb
    kind = type(backend)
    sends = StageSends(pp.group)
    backend.new_group = groups.find
    if pp.size > 1:

        def recv(tensor, src=None, group=None, tag=0):
            received = kind.recv(backend, tensor, src, group or pp.group, tag)
            sends.finish()
            return received

        backend.send, backend.recv = sends.start, recv
    return sends


class StageSends:
    """Messages to other stages that are under way while this stage computes.

    A blocking send holds up the sender until the receiver takes the message, but in DeepSpeed's 1F1B schedule a stage
    sends an output right before it computes the backward of another micro-batch. Messages are waited for after the next
    receipt: by then that backward is done.
    """

    def __init__(self, group: Any):
        self._group = group
        self._pending: list[tuple[dist.Work, Tensor]] = []
        """Messages, which must stay in memory until they are sent."""

    def start(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> None:
        """Start to send `tensor`, whose contents must not change until `finish`."""
        work = dist.isend(tensor, dst, group or self._group, tag)
        assert work is not None, f"this rank or {dst} is not in the group"
        self._pending.append((work, tensor))

    def finish(self) -> None:
        """Wait for all messages."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()
