"""What layers ask of a mesh, answered for a model that this process holds alone."""

from torch.distributed import HashStore, ProcessGroup

from megakernel.attention.sequence import WHOLE, ContextParallelShard
from megakernel.config.parallel import SoftmaxExchange
from megakernel.parallel.axis import Axis


class OneProcess:
    """The mesh of a model that stands in somebody else's program: it starts no process group and asks for none.

    So that program may have groups of its own, or start some later.
    """

    # Of the class: a copy of a model does not copy the group, which cannot be copied.
    tp = Axis(ProcessGroup(HashStore(), 0, 1), 0, (0,))
    sequence_parallel = False
    softmax_exchange: SoftmaxExchange = "auto"

    def new_cp_shard(self) -> ContextParallelShard:
        """The whole sequence."""
        return WHOLE
