"""A layer that backward runs again instead of keeping what it computed."""

from collections.abc import Callable

from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint


def recomputed(
    function: Callable[..., Tensor], hidden: Tensor, positions: Tensor, *, offload: bool
) -> Tensor:
    """`function(hidden, positions)`, of which the arguments alone are kept until backward.

    offload: they wait in pinned host memory. Not DeepSpeed's way of doing that: 0.19.8 empties the tensors it was
    handed, of which its own pipeline engine still holds some.
    """
    if not offload:
        return checkpoint(function, hidden, positions, use_reentrant=False)
    with save_on_cpu(pin_memory=hidden.is_cuda):
        # Only this form saves its arguments as autograd's tensors, which is what the hook moves.
        return checkpoint(function, hidden, positions, use_reentrant=True)
