"""The mesh, world = tp x cp x dp x pp, whose groups Megatron-core and DeepSpeed share."""

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from megatron.core import parallel_state
from torch import Tensor

from megakernel.attention.sequence import WHOLE_SEQUENCE, ContextParallelShard
from megakernel.config import Parallel, UserError
from megakernel.parallel.axis import Axis, Line
from megakernel.parallel.device import claim_device, silence_other_ranks
from megakernel.parallel.exchange_method import shards_per_machine
from megakernel.parallel.groups import ProcessGroups, lend_to_deepspeed, lend_to_megatron, rank_lines
from megakernel.parallel.processes import ProcessEnvironment
from megakernel.parallel.progress import Progress
from megakernel.parallel.rendezvous import connect_store
from megakernel.parallel.sequence import GroupShard
from megakernel.parallel.state_exchange import Background


class ModelParallelUnit:
    """The `mpu` of `deepspeed.initialize`: getters `get_NAME_group`, `get_NAME_rank` and so on.

    DeepSpeed averages gradients and shards optimizer states over its data-parallel group, here dp x cp. It reduces
    norms and overflow flags over the model-parallel group, tp x pp, whose ranks name checkpoint files; tensor rank 0
    counts replicated parameters in norms. There are deliberately no sequence-parallel getters: with them DeepSpeed
    separates cp from dp and rescales gradients.
    """

    def __init__(self, tp: Axis, pp: Axis, model: Axis, gradient: Axis):
        axes = {
            "data_parallel": gradient,
            "model_parallel": model,
            "tensor_model_parallel": tp,
            "pipeline_model_parallel": pp,
        }
        for name, axis in axes.items():
            for suffix, value in (("group", axis.group), ("rank", axis.rank), ("world_size", axis.size)):
                setattr(self, f"get_{name}_{suffix}", lambda value=value: value)
        self.get_data_parallel_group_ranks = lambda: list(gradient.ranks)
        self.get_tensor_model_parallel_src_rank = lambda: tp.ranks[0]


class Mesh:
    """All process groups of a run; created once, when torch.distributed is initialized, and destroyed at the end.

    Attributes:
        rank, world_size: of this process among all processes.
        device: the device of this process.
        tp, cp, dp, pp: tensor, context, data and pipeline axes; tp varies fastest with the rank, pp slowest. Nothing is
            exchanged along dp alone, so it has no group.
        states: cp in a group of its own, over which states are exchanged while others use cp's.
        gradient: dp x cp, over which gradients are averaged and ZeRO shards.
        model: tp x pp, which holds one copy of the weights.
        sequence_parallel: whether norms and residuals are sharded along the sequence over tp.
        state_exchange: how context-parallel shards exchange kernel states.
        softmax_exchange: how softmax layers reach the other shards of a sequence.
        topology: the same rank order for DeepSpeed's PipelineModule, where `data` is `gradient`.
        progress: the progress of this process.
        store: the key-value store of all processes.
        local_world_size: processes on this machine.
        mpu: for `deepspeed.initialize` without a pipeline.
        stage_sends: what DeepSpeed's pipeline has sent to other stages and not finished.
    """

    def __init__(
        self, parallel: Parallel, device: torch.device, store: dist.Store, local_world_size: int = 1
    ):
        self.device = device
        self.store = store
        self.local_world_size = local_world_size
        self.progress = Progress()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.sequence_parallel = parallel.sequence_parallel
        self.softmax_exchange = parallel.softmax_exchange
        self._lines = rank_lines(parallel, self.world_size)
        self._groups = ProcessGroups(
            timedelta(minutes=parallel.timeout_minutes), splits=dist.get_backend() == "nccl"
        )
        # DeepSpeed finds the first that has the ranks it asks for: gradients must not wait for exchanges along cp.
        self.gradient = self._axis("dp-cp")
        self.tp = self._axis("tp")
        # With one stage only norms and flags would have another group than tp.
        self.model = self._axis("tp-pp") if parallel.pipeline > 1 else self.tp
        self.pp = self._axis("pp")
        self.cp = self._axis("cp")
        self.states = self._axis("cp") if parallel.context > 1 else self.cp
        self._copies: dict[int, Axis] = {}
        data = next(line for line in self._lines.get_ranks("dp") if self.rank in line)
        self.dp = Line(data.index(self.rank), tuple(data))
        lend_to_megatron(self.tp, self.cp, self.pp, self.gradient, self.model)
        self.stage_sends = lend_to_deepspeed(self._groups, self.pp)
        self.state_exchange = parallel.state_exchange
        self._shards_per_machine = 1
        if self.cp.size > 1:
            # The smallest of all processes: each chooses how states travel, and all have to choose alike.
            (smallest,) = self.all_reduce_max(-local_world_size)
            self._shards_per_machine = shards_per_machine(self.cp.ranks, -smallest)
        # One for all layers: torch's allocator keeps the memory of each CUDA stream apart.
        self._background = Background(device)
        self.topology = PipeModelDataParallelTopology(
            num_pp=self.pp.size, num_mp=self.tp.size, num_dp=self.gradient.size
        )
        self.mpu = ModelParallelUnit(self.tp, self.pp, self.model, self.gradient)
        coordinates = {"model": self.tp.rank, "data": self.gradient.rank, "pipe": self.pp.rank}
        assert self.topology.get_rank(**coordinates) == self.rank, (coordinates, self.rank)

    @classmethod
    def create(cls, parallel: Parallel, process: ProcessEnvironment, device: torch.device) -> "Mesh":
        """Initialize torch.distributed and build all groups.

        The rendezvous is at torchrun's MASTER_ADDR and MASTER_PORT if they are set; a single process needs none.

        Raises:
            UserError: tensor x context x pipeline does not divide the world, and nothing is started; or another process
                computes on this one's GPU.
        """
        if process.world_size % parallel.model_size:
            raise UserError(
                f"parallel.tensor={parallel.tensor} x parallel.context={parallel.context} x "
                f"parallel.pipeline={parallel.pipeline} does not divide {process.world_size} processes; "
                f"start a multiple of {parallel.model_size} or change parallel"
            )
        timeout = timedelta(minutes=parallel.timeout_minutes)
        store = connect_store(process, timeout)
        if device.type == "cuda" and torch.cuda.device_count() < process.local_world_size:
            claim_device(store, socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid))
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            rank=process.rank,
            world_size=process.world_size,
            timeout=timeout,
            store=dist.PrefixStore("torch", store),
            device_id=device if device.type == "cuda" else None,
        )
        silence_other_ranks(process.rank)
        deepspeed.init_distributed(dist_init_required=False, timeout=timeout)
        return cls(parallel, device, store, process.local_world_size)

    def new_cp_shard(self) -> ContextParallelShard:
        """A new `ContextParallelShard` of this process, with its own traffic counts."""
        if self.cp.size == 1:
            return WHOLE_SEQUENCE
        options = (self.state_exchange, self.progress, self.states, self._shards_per_machine)
        return GroupShard(self.cp, self._background, *options)

    def copies(self, key_heads: int) -> Axis | None:
        """The tensor ranks that hold the same one of a layer's `key_heads`; None if each rank holds whole ones alone.

        The first call with a number builds the groups, so all ranks make it.
        """
        if key_heads >= self.tp.size:
            return None
        if key_heads not in self._copies:
            size = self.tp.size // key_heads
            lines = [
                line[first : first + size]
                for line in self._lines.get_ranks("tp")
                for first in range(0, len(line), size)
            ]
            axis = self.tp if key_heads == 1 else self._groups.build(lines, "key head")
            assert axis is not None
            self._copies[key_heads] = axis
        return self._copies[key_heads]

    def build_ends(self) -> None:
        """Build the groups of first and last stages, in which DeepSpeed sums gradients of tied embeddings."""
        if self.pp.size > 2:
            self._groups.build([[line[0], line[-1]] for line in self._lines.get_ranks("pp")], "ends")

    def _axis(self, parallelisms: str) -> Axis:
        axis = self._groups.build(self._lines.get_ranks(parallelisms), parallelisms)
        assert axis is not None
        return axis

    @property
    def is_first_stage(self) -> bool:
        """Whether this process holds the embedding."""
        return self.pp.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this process holds the head and computes the loss."""
        return self.pp.rank == self.pp.size - 1

    def sum(self, tensor: Tensor, axis: Axis) -> Tensor:
        """The sum of `tensor` over the processes of an axis, as a new tensor; not differentiable."""
        total = tensor.detach().clone()
        dist.all_reduce(total, group=axis.group)
        return total

    def all_reduce_max(self, *flags: int) -> list[int]:
        """The largest of each flag of all processes, so that all act on an event that one of them saw."""
        if self.world_size == 1:
            return [*flags]
        largest = torch.tensor(flags, dtype=torch.int64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest.tolist()

    def gather_objects(self, value: Any) -> list[Any]:
        """One picklable value per process, in rank order."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """The picklable value of rank 0; also a barrier."""
        values = [value]
        dist.broadcast_object_list(values)
        self.barrier()
        return values[0]

    def gather_numbers(self, values: Sequence[float]) -> list[list[float]]:
        """Equally many numbers of each process, in rank order."""
        local = torch.tensor(values, dtype=torch.float64, device=self.device)
        gathered = local.new_empty(self.world_size * len(values))  # one tensor: one copy from the device
        dist.all_gather_into_tensor(gathered, local)
        return gathered.view(self.world_size, len(values)).tolist()

    def barrier(self) -> None:
        """Wait for all processes."""
        dist.barrier()

    def destroy(self) -> None:
        """Destroy all groups; without this, a gloo process that succeeded may still abort on exit."""
        parallel_state.destroy_model_parallel()
        deepspeed.comm.destroy_process_group()
