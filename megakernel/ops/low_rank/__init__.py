"""Low rank along the sequence: tokens become landmarks, E x (docs/formulas.md, 3)."""

from torch import Tensor

from megakernel.ops.dispatch import choose
from megakernel.ops.low_rank import chunked, reference

IMPLEMENTATIONS = {"chunked": chunked.compress, "reference": reference.compress}
"""Backend -> implementation."""


def compress(
    x: Tensor, pool: Tensor, *, first: int = 0, length: int | None = None, backend: str | None = None
) -> Tensor:
    """The part of E x that tokens `first` .. `first` + n - 1 of rows of `length` tokens contribute.

    Every block of b tokens has r landmarks, each a weighted sum of the block's tokens. `block` compression has
    short blocks; Linformer is one block as long as the longest row, of which shorter rows use the first columns.
    The parts of consecutive stretches of a row add up to the whole, wherever it is cut.

    Args:
        x: (..., n, c) tokens; (..., H, n, c) for pools per head.
        pool: E, (r, b) or (H, r, b).
        first: place of the first token in its row.
        length: tokens of the whole row; None: these are all.
        backend: reference or chunked.

    Returns:
        (..., L, c) with L = r ceil(length / b), in float32 or better: what parts add up to is rounded once, by
        whoever rounds the sum. Where x is in half precision, so are the factors of E x, but not its sums.

    Raises:
        ValueError: a stretch that does not lie in its row.
    """
    length = x.shape[-2] if length is None else length
    if first < 0 or first + x.shape[-2] > length:
        raise ValueError(
            f"first={first}: {x.shape[-2]} tokens from there do not lie in a row of length={length}; change one"
        )
    return choose(IMPLEMENTATIONS, backend)(x, pool, first, length)
