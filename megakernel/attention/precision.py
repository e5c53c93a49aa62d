"""What stays in float32 when a model becomes half precision."""

from torch import Tensor, nn


class FullPrecision(nn.Module):
    """A module whose parameters and buffers stay in float32 or better under `bfloat16()` and its like.

    For what makes exponents and angles of tokens, or sums over many steps: of an exponent of 300 the 8 bits of bfloat16
    leave an error of 0.6. DeepSpeed casts the parameters that it trains without asking the module: there they are
    bfloat16 roundings of its float32 master weights, and buffers alone stay.
    """

    def _apply(self, fn, recurse=True):
        def kept(x: Tensor) -> Tensor:
            y = fn(x)
            narrowed = y.is_floating_point() and y.dtype.itemsize < 4
            return x.to(y.device) if narrowed else y

        return super()._apply(kept, recurse)
