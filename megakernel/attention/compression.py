"""E and F of a layer: what shortens keys and values along the sequence (docs/formulas.md, 3)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megakernel.attention.flurka import pooling_logits
from megakernel.attention.heads import HeadShard, Seed, generator
from megakernel.attention.precision import FullPrecision
from megakernel.config.compression import BlockCompression, Compression, LinformerCompression
from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.low_rank import compress


class Landmarks(NamedTuple):
    """Compressed keys and values."""

    keys: Tensor
    """(B, H_kv, L, d)"""

    values: Tensor
    """(B, H_kv, L, D)"""

    mass: Tensor | None
    """(B, L) or (1, L): how many tokens a landmark stands for; None where all stand for equally many."""


class Compressor(FullPrecision):
    """E and F, learned unless they are the means of `pool`.

    Rows of `block` and `pool` have sum 1, so that a constant stays constant; where a row of tokens ends inside a block
    the weights of its real tokens do. Linformer's E is free, N(0, 1 / d_k) at the start.
    """

    def __init__(
        self,
        compression: Compression,
        max_positions: int | None,
        kv_heads: range,
        seed: Seed,
        heads: HeadShard,
    ):
        super().__init__()
        self.heads = heads
        self.per_head = getattr(compression, "per_head", False)
        self.normalized = not isinstance(compression, LinformerCompression)
        self.matrices: nn.Parameter | None = None
        if isinstance(compression, LinformerCompression):
            if max_positions is None:
                raise ValueError(
                    "compression.kind=linformer needs the length of the longest row; pass max_positions"
                )
            self.rank, self.block_size = compression.rank, max_positions
            both = _gaussian(compression, max_positions, kv_heads, seed)
        elif isinstance(compression, BlockCompression):
            self.rank, self.block_size = compression.rank, compression.block_size
            both = pooling_logits(self.rank, self.block_size).repeat(2, 1, 1)
            if self.per_head:
                both = both.repeat(len(kv_heads), 1, 1, 1)
        else:
            self.rank, self.block_size = 1, compression.block_size
            return
        # Beside each other in memory: what both act on, they act on as one matrix.
        self.matrices = nn.Parameter(both[..., :1, :, :].clone() if compression.share_kv else both)

    @property
    def sharded(self) -> tuple[str, ...]:
        """Parameters that count heads in their first dimension."""
        return tuple(name for name, _ in self.named_parameters()) if self.per_head else ()

    def pools(self, like: Tensor) -> Tensor:
        """E and F for tokens `like`, or E alone where keys and values share it: (p, r, b) or (H_kv, p, r, b).

        Float32 or better where rows have sum 1; Linformer's are the parameter itself, a view and no copy.
        """
        if self.matrices is None:
            return like.new_full((1, 1, self.block_size), 1 / self.block_size, dtype=accum_dtype(like.dtype))
        used = self.matrices if self.per_head else self.heads.shared(self.matrices)
        used = used.to(like.device)
        return used.to(accum_dtype(used.dtype)).softmax(-1) if self.normalized else used

    def forward(self, parts: tuple[Tensor, ...], *, first: int, length: int) -> tuple[Tensor, ...]:
        """What tokens from place `first` on contribute to the landmarks of rows of `length` tokens.

        parts: one tensor (..., n, c) to which both E and F are applied, or the keys and the values.
        Returns E x and F x, (..., L, c) in float32 or better; E x alone where one E makes both of one tensor.
        """
        if not self.normalized and length > self.block_size:
            raise ValueError(
                f"rows of {length} tokens exceed max_positions={self.block_size}, linformer's columns; "
                "raise model.max_positions or shorten the rows"
            )
        pools = self.pools(parts[0])
        if len(parts) == 1:
            # One product, [E; F] x: tokens are read once, forward and backward.
            both = compress(parts[0], pools.flatten(-3, -2), first=first, length=length)
            blocks = both.unflatten(-2, (-1, pools.shape[-3], self.rank))
            return tuple(x.flatten(-3, -2) for x in blocks.unbind(-3))
        each = [pools.select(-3, min(i, pools.shape[-3] - 1)) for i in range(len(parts))]
        return tuple(compress(x, pool, first=first, length=length) for x, pool in zip(parts, each))

    def finish(self, keys: Tensor, values: Tensor, *, length: int, counts: Tensor | None) -> Landmarks:
        """Landmarks from whole sums (B, H_kv, L, .) over rows of `length` tokens, of which `counts` (B,) are real."""
        if not self.normalized or (counts is None and length % self.block_size == 0):
            return Landmarks(keys, values, None)
        if counts is None:
            counts = torch.tensor([length], device=keys.device)
        blocks = torch.arange(keys.shape[2] // self.rank, device=keys.device)
        real = (counts[:, None] - blocks * self.block_size).clamp(0, self.block_size)
        pools = self.pools(keys)
        keys = keys / self._shares(pools.select(-3, 0), real).to(keys.dtype)
        values = values / self._shares(pools.select(-3, -1), real).to(values.dtype)
        return Landmarks(
            keys, values, (real.to(accum_dtype(keys.dtype)) / self.rank).repeat_interleave(self.rank, 1)
        )

    def _shares(self, pool: Tensor, real: Tensor) -> Tensor:
        """(B, 1 or H_kv, L, 1): weight that lies on the first `real` (B, blocks) tokens of each block, 1 where none."""
        sums = nn.functional.pad(pool.cumsum(-1), (1, 0), value=0.0)
        sums = sums if sums.dim() == 3 else sums[None]
        shares = sums[..., real].permute(2, 0, 3, 1).flatten(2)[..., None]
        return shares.masked_fill(shares == 0, 1.0)


def _gaussian(compression: LinformerCompression, columns: int, kv_heads: range, seed: Seed) -> Tensor:
    """E and F ~ N(0, 1 / d_k), (2, d_k, N) or, for each of `kv_heads`, (H_kv, 2, d_k, N)."""

    def draw(*place: int | str) -> Tensor:
        both = torch.randn(
            2,
            compression.rank,
            columns,
            generator=generator(seed, *place, "linformer"),
            dtype=torch.float64,
            device="cpu",
        )
        return both.to(torch.get_default_device()).float() * compression.rank**-0.5

    return torch.stack([draw(head) for head in kv_heads]) if compression.per_head else draw()
