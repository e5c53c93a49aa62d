"""Windowed softmax in linear time on any device."""

from torch import Tensor

from megakernel.ops.documents import Positions
from megakernel.ops.groups import Tensors, scan_groups
from megakernel.ops.sums import normalized
from megakernel.ops.window import Rotary, Tail, window_sums

GROUP = 4096
"""Tokens whose windows exist at once; the next multiple of a block is taken."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int,
    blocks: int,
    priors: Tensor | None,
    shift: Tensor | None,
    rotary: Rotary | None,
    positions: Positions,
    tail: Tail,
) -> tuple[Tensor, Tail]:
    """Attention (B, H, N, D) and the tail after the last token."""
    varying = None if isinstance(positions, int) else positions[:, None]

    def on_group(start: int, carry: Tensors, sequences: Tensors, shared: Tensors):
        q, k, v, at = sequences
        tail, (priors, shift) = Tail(*carry), shared
        places = positions + start if at is None else at[:, 0]
        sums = window_sums(
            q,
            k,
            v,
            tail,
            places,
            block_size=block_size,
            blocks=blocks,
            rotary=rotary,
            priors=priors,
            shift=shift,
        )
        return (normalized(sums).to(v.dtype),), tuple(tail.after(k, v))

    group = block_size * max(1, GROUP // block_size)
    (out,), left = scan_groups(on_group, tuple(tail), (q, k, v, varying), (priors, shift), group=group)
    return out, Tail(*left)
