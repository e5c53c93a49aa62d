"""Parameters that tensor ranks hold whole, though each of them sees only a part of what they act on."""

from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup


def replicated(parameter: Tensor, group: ProcessGroup | None) -> Tensor:
    """`parameter`, whose gradient is the sum of what the processes of `group` compute from it.

    For what the heads of all tensor ranks share, and for norms and biases on sequence shards. With group None
    the gradient stays this process's own.
    """
    if group is None:
        return parameter
    return copy_to_tensor_model_parallel_region(parameter, group=group)
