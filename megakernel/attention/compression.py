"""E and F of a layer: what shortens keys and values along the sequence (MECHANISMS section 3)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megakernel.attention.flurka import pooling_logits
from megakernel.attention.heads import HeadShard, Seed, generator
from megakernel.attention.precision import FullPrecision
from megakernel.config.compression import BlockCompression, Compression, LinformerCompression
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
        self.keys: nn.Parameter | None = None
        self.values: nn.Parameter | None = None
        if isinstance(compression, LinformerCompression):
            if max_positions is None:
                raise ValueError(
                    "compression.kind=linformer needs the length of the longest row; pass max_positions"
                )
            self.rank, self.block_size = compression.rank, max_positions
            first, second = _gaussian(compression, max_positions, kv_heads, seed)
        elif isinstance(compression, BlockCompression):
            self.rank, self.block_size = compression.rank, compression.block_size
            first = pooling_logits(self.rank, self.block_size)
            if self.per_head:
                first = first.repeat(len(kv_heads), 1, 1)
            second = first.clone()
        else:
            self.rank, self.block_size = 1, compression.block_size
            return
        self.keys = nn.Parameter(first)
        if not compression.share_kv:
            self.values = nn.Parameter(second)

    @property
    def sharded(self) -> tuple[str, ...]:
        """Parameters that count heads in their first dimension."""
        return tuple(name for name, _ in self.named_parameters()) if self.per_head else ()

    def pools(self) -> tuple[Tensor, ...]:
        """(E, F), or (E,) where keys and values share it, (r, b) or (H_kv, r, b) in float32 or better."""
        if self.keys is None:
            return (torch.full((1, self.block_size), 1 / self.block_size),)
        learned = [x for x in (self.keys, self.values) if x is not None]
        used = learned if self.per_head else [self.heads.shared(x) for x in learned]
        wide = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in used)
        return tuple(x.softmax(-1) if self.normalized else x for x in wide)

    def forward(self, parts: tuple[Tensor, ...], *, first: int, length: int) -> tuple[Tensor, ...]:
        """What tokens from place `first` on contribute to the landmarks of rows of `length` tokens.

        parts: one tensor (..., n, c) to which both E and F are applied, or the keys and the values.
        Returns E x and F x, (..., L, c); E x alone where one E makes both of one tensor.
        """
        if not self.normalized and length > self.block_size:
            raise ValueError(
                f"rows of {length} tokens exceed max_positions={self.block_size}, linformer's columns; "
                "raise model.max_positions or shorten the rows"
            )
        pools = [pool.to(parts[0].device) for pool in self.pools()]
        if len(parts) > len(pools):
            pools = pools * len(parts)
        return tuple(
            compress(parts[min(i, len(parts) - 1)], pool, first=first, length=length)
            for i, pool in enumerate(pools)
        )

    def finish(self, keys: Tensor, values: Tensor, *, length: int, counts: Tensor | None) -> Landmarks:
        """Landmarks from whole sums (B, H_kv, L, .) over rows of `length` tokens, of which `counts` (B,) are real."""
        if not self.normalized or (counts is None and length % self.block_size == 0):
            return Landmarks(keys, values, None)
        if counts is None:
            counts = torch.tensor([length], device=keys.device)
        blocks = torch.arange(keys.shape[2] // self.rank, device=keys.device)
        real = (counts[:, None] - blocks * self.block_size).clamp(0, self.block_size)
        pools = self.pools()
        keys = keys / self._shares(pools[0].to(keys.device), real).to(keys.dtype)
        values = values / self._shares(pools[-1].to(values.device), real).to(values.dtype)
        return Landmarks(keys, values, (real / self.rank).repeat_interleave(self.rank, 1))

    def _shares(self, pool: Tensor, real: Tensor) -> Tensor:
        """(B, 1 or H_kv, L, 1): weight that lies on the first `real` (B, blocks) tokens of each block, 1 where none."""
        sums = nn.functional.pad(pool.cumsum(-1), (1, 0), value=0.0)
        sums = sums if sums.dim() == 3 else sums[None]
        shares = sums[..., real].permute(2, 0, 3, 1).flatten(2)[..., None]
        return shares.masked_fill(shares == 0, 1.0)


def _gaussian(
    compression: LinformerCompression, columns: int, kv_heads: range, seed: Seed
) -> tuple[Tensor, Tensor]:
    """E and F ~ N(0, 1 / d_k), (d_k, N) or one for each of `kv_heads`."""

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

    if not compression.per_head:
        first, second = draw()
        return first, second
    drawn = torch.stack([draw(head) for head in kv_heads], 1)
    return drawn[0], drawn[1]
