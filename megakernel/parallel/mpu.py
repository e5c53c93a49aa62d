"""The mesh in the words of DeepSpeed's engine."""

from torch.distributed import ProcessGroup

from megakernel.parallel.axis import Axis


class ModelParallelUnit:
    """What `deepspeed.initialize(mpu=...)` asks about the mesh.

    DeepSpeed averages gradients and shards optimizer state over its data parallel group: here dp x cp. There
    are deliberately no sequence-parallel getters: with them DeepSpeed keeps cp apart and rescales gradients.
    """

    def __init__(self, tp: Axis, pp: Axis, model: Axis, gradient: Axis):
        self._tp = tp
        self._pp = pp
        self._model = model
        self._gradient = gradient

    def get_data_parallel_group(self) -> ProcessGroup:
        """Group of dp x cp."""
        return self._gradient.group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """World ranks of dp x cp."""
        return list(self._gradient.ranks)

    def get_data_parallel_rank(self) -> int:
        """This process in dp x cp."""
        return self._gradient.rank

    def get_data_parallel_world_size(self) -> int:
        """Size of dp x cp."""
        return self._gradient.size

    def get_model_parallel_group(self) -> ProcessGroup:
        """Group of tp x pp: norms and overflow flags are joined over it."""
        return self._model.group

    def get_model_parallel_rank(self) -> int:
        """This process in tp x pp; names its checkpoint file."""
        return self._model.rank

    def get_model_parallel_world_size(self) -> int:
        """Size of tp x pp."""
        return self._model.size

    def get_tensor_model_parallel_group(self) -> ProcessGroup:
        """Group of tp."""
        return self._tp.group

    def get_tensor_model_parallel_rank(self) -> int:
        """This process in tp; rank 0 counts replicated parameters in norms."""
        return self._tp.rank

    def get_tensor_model_parallel_world_size(self) -> int:
        """Size of tp."""
        return self._tp.size

    def get_tensor_model_parallel_src_rank(self) -> int:
        """World rank of the first process of tp."""
        return self._tp.ranks[0]

    def get_pipeline_model_parallel_group(self) -> ProcessGroup:
        """Group of pp."""
        return self._pp.group

    def get_pipeline_model_parallel_rank(self) -> int:
        """This process in pp."""
        return self._pp.rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Size of pp."""
        return self._pp.size
