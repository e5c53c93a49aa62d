"""The mesh: world = tp x cp x dp x pp, the one object on which Megatron-core and DeepSpeed agree."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from megatron.core import parallel_state
from torch import Tensor

from megakernel.attention.sequence import WHOLE, ContextParallelShard
from megakernel.config import Parallel, UserError
from megakernel.parallel.axis import Axis
from megakernel.parallel.device import quieten_ranks
from megakernel.parallel.processes import ProcessEnvironment
from megakernel.parallel.progress import Progress
from megakernel.parallel.rendezvous import meet
from megakernel.parallel.sequence import GroupShard


class ModelParallelUnit:
    """What `deepspeed.initialize(mpu=...)` asks about the mesh: `get_NAME_group`, `get_NAME_rank` and so on.

    DeepSpeed averages gradients and shards optimizer state over its data parallel group: here dp x cp. Norms and
    overflow flags are joined over the model parallel group, tp x pp, whose ranks name checkpoint files; tensor rank 0
    counts replicated parameters in norms. There are deliberately no sequence-parallel getters: with them DeepSpeed
    keeps cp apart and rescales gradients.
    """

    def __init__(self, tp: Axis, pp: Axis, model: Axis, gradient: Axis):
        axes = {
            "data_parallel": gradient,
            "model_parallel": model,
            "tensor_model_parallel": tp,
            "pipeline_model_parallel": pp,
        }
        for name, axis in axes.items():
            for what, value in (("group", axis.group), ("rank", axis.rank), ("world_size", axis.size)):
                setattr(self, f"get_{name}_{what}", lambda value=value: value)
        self.get_data_parallel_group_ranks = lambda: list(gradient.ranks)
        self.get_tensor_model_parallel_src_rank = lambda: tp.ranks[0]


class Mesh:
    """All process groups of a run; created once, passed on, destroyed at the end.

    Attributes:
        rank, world_size: this process among all.
        device: where it computes.
        tp, cp, dp, pp: tensor, context, data and pipeline axes; tp varies fastest with the rank, pp slowest.
        gradient: dp x cp, over which gradients are averaged and ZeRO shards.
        model: tp x pp, which together hold one copy of the weights.
        sequence_parallel: whether norms and residuals are sharded along the sequence over tp.
        state_exchange: how kernel states go from shard to shard.
        softmax_exchange: how softmax layers reach the other shards of a sequence.
        topology: the same order for DeepSpeed's PipelineModule, where `data` is `gradient`.
        progress: how far this process is.
        store: what all processes can write to and read.
        mpu: what `deepspeed.initialize` asks for when there is no pipeline.
    """

    def __init__(self, parallel: Parallel, device: torch.device, store: dist.Store):
        self.device = device
        self.store = store
        self.progress = Progress()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.sequence_parallel = parallel.sequence_parallel
        self.softmax_exchange = parallel.softmax_exchange
        self.tp = Axis.of(parallel_state.get_tensor_model_parallel_group())
        self.cp = Axis.of(parallel_state.get_context_parallel_group())
        self.dp = Axis.of(parallel_state.get_data_parallel_group())
        self.pp = Axis.of(parallel_state.get_pipeline_model_parallel_group())
        self.gradient = Axis.of(parallel_state.get_data_parallel_group(with_context_parallel=True))
        self.model = Axis.of(parallel_state.get_model_parallel_group())
        self.state_exchange = parallel.state_exchange
        self.topology = PipeModelDataParallelTopology(
            num_pp=self.pp.size, num_mp=self.tp.size, num_dp=self.gradient.size
        )
        self.mpu = ModelParallelUnit(self.tp, self.pp, self.model, self.gradient)
        coordinates = {"model": self.tp.rank, "data": self.gradient.rank, "pipe": self.pp.rank}
        assert self.topology.get_rank(**coordinates) == self.rank, (coordinates, self.rank)

    @classmethod
    def create(cls, parallel: Parallel, process: ProcessEnvironment, device: torch.device) -> "Mesh":
        """Join the other processes and build every group.

        They meet where torchrun's environment says (MASTER_ADDR, MASTER_PORT); one process meets nobody.

        Raises:
            UserError: tensor x context x pipeline does not divide the world; nothing is started then.
        """
        if process.world_size % parallel.model_size:
            raise UserError(
                f"parallel.tensor={parallel.tensor} x parallel.context={parallel.context} x "
                f"parallel.pipeline={parallel.pipeline} does not divide {process.world_size} processes; "
                f"start a multiple of {parallel.model_size} or change parallel"
            )
        timeout = timedelta(minutes=parallel.timeout_minutes)
        store = meet(process, timeout)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            rank=process.rank,
            world_size=process.world_size,
            timeout=timeout,
            store=dist.PrefixStore("torch", store),
            device_id=device if device.type == "cuda" else None,
        )
        quieten_ranks(process.rank)
        deepspeed.init_distributed(dist_init_required=False, timeout=timeout)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            context_parallel_size=parallel.context,
            pipeline_model_parallel_size=parallel.pipeline,
            distributed_timeout_minutes=parallel.timeout_minutes,
            create_gloo_process_groups=False,
        )
        return cls(parallel, device, store)

    def new_cp_shard(self) -> ContextParallelShard:
        """This process's shard of every sequence, with a count of its own of what it sends."""
        return WHOLE if self.cp.size == 1 else GroupShard(self.cp, self.state_exchange, self.progress)

    @property
    def is_first_stage(self) -> bool:
        """This process holds the embedding."""
        return self.pp.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """This process holds the head and computes the loss."""
        return self.pp.rank == self.pp.size - 1

    def sum(self, tensor: Tensor, axis: Axis) -> Tensor:
        """The sum of `tensor` over an axis, as a new tensor on every process of it; not differentiable."""
        total = tensor.detach().clone()
        dist.all_reduce(total, group=axis.group)
        return total

    def agree(self, flag: int) -> int:
        """The largest `flag` of all processes, so that all of them act on what one of them saw."""
        largest = torch.tensor(flag, dtype=torch.int64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest.item())

    def gather_objects(self, value: Any) -> list[Any]:
        """One picklable value of each process, in the order of ranks."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """The picklable value of rank 0, once every process is here."""
        values = [value]
        dist.broadcast_object_list(values)
        self.barrier()
        return values[0]

    def gather_numbers(self, values: Sequence[float]) -> list[list[float]]:
        """As many numbers of each process, in the order of ranks."""
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(rows, own)
        return [row.tolist() for row in rows]

    def barrier(self) -> None:
        """Wait until every process is here."""
        dist.barrier()

    def destroy(self) -> None:
        """Leave every group; a gloo process that exits without this can abort although its work succeeded."""
        parallel_state.destroy_model_parallel()
        deepspeed.comm.destroy_process_group()
