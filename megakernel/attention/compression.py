"""E and F of a layer: what shortens keys and values along the sequence (docs/formulas.md, 3)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megakernel.attention.heads import LayerSettings, generator
from megakernel.attention.layer import FullPrecision
from megakernel.config.algebra import BlockCompression, Compression, LinformerCompression
from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.low_rank import compress

OWN_SHARE = 0.9
"""Share of a landmark's initial weight on its own stretch of the block."""


def own_stretch(rank: int, block_size: int) -> Tensor:
    """(r, b) bool: the token belongs to the landmark's own stretch of the block, b / r tokens."""
    return torch.arange(block_size) * rank // block_size == torch.arange(rank)[:, None]


def pooling_logits(rank: int, block_size: int) -> Tensor:
    """Initial logits (r, b) of E and F, whose rows are softmaxed.

    Landmark s starts as a mean over its own stretch of b / r tokens: landmarks that started alike would stay
    alike, since they would receive equal gradients. A tenth of the weight lies on the rest of the block, so
    that every token gets a gradient. With r = b there is no rest to learn from: landmark s is token s, exact
    to rounding (a share of e^-40 on others), and the layer starts as exact attention.
    """
    own = own_stretch(rank, block_size)
    if rank == block_size:
        return torch.where(own, 0.0, -40.0)
    inside = own.sum(1, keepdim=True)
    outside = (block_size - inside).clamp(min=1)
    gap = torch.log(OWN_SHARE / inside) - torch.log((1 - OWN_SHARE) / outside)
    return torch.where(own, 0.0, -gap)


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

    def __init__(self, compression: Compression, settings: LayerSettings):
        super().__init__()
        self.heads, max_positions = settings.heads, settings.max_positions
        self.per_head = getattr(compression, "per_head", False)
        self.normalized = not isinstance(compression, LinformerCompression)
        self.matrices: nn.Parameter | None = None
        if isinstance(compression, LinformerCompression):
            if max_positions is None:
                raise ValueError(
                    "compression.kind=linformer needs the length of the longest sequence; pass max_positions"
                )
            self.rank, self.block_size = compression.rank, max_positions
            both = _gaussian(compression, max_positions, settings)
        elif isinstance(compression, BlockCompression):
            self.rank, self.block_size = compression.rank, compression.block_size
            both = pooling_logits(self.rank, self.block_size).repeat(2, 1, 1)
            if self.per_head:
                both = both.repeat(len(settings.kv_heads), 1, 1, 1)
        else:
            self.rank, self.block_size = 1, compression.block_size
            return
        # Beside each other in memory: what both act on, they act on as one matrix.
        self.matrices = nn.Parameter(both[..., :1, :, :].clone() if compression.share_kv else both)

    def sharded_parameters(self) -> dict[str, int]:
        """E and F where they are per head."""
        return {name: 0 for name, _ in self.named_parameters() if self.per_head}

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
        """What tokens from place `first` on contribute to the landmarks of sequences of `length` tokens.

        parts: one tensor (..., n, c) to which both E and F are applied, or the keys and the values.
        Returns E x and F x, (..., L, c) in float32 or better; E x alone where one E makes both of one tensor.
        """
        if not self.normalized and length > self.block_size:
            raise ValueError(
                f"sequences of {length} tokens exceed max_positions={self.block_size}, linformer's columns; "
                "raise model.max_positions or shorten the sequences"
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
        """Landmarks from whole sums (B, H_kv, L, .) over sequences of `length` tokens, `counts` (B,) of them real."""
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


def _gaussian(compression: LinformerCompression, columns: int, settings: LayerSettings) -> Tensor:
    """E and F ~ N(0, 1 / d_k), (2, d_k, N) or, for each key head, (H_kv, 2, d_k, N)."""

    def draw(*place: int | str) -> Tensor:
        both = torch.randn(
            2,
            compression.rank,
            columns,
            generator=generator(settings.seed, *place, "linformer"),
            dtype=torch.float64,
            device="cpu",
        )
        return both.to(torch.get_default_device()).float() * compression.rank**-0.5

    return torch.stack([draw(head) for head in settings.kv_heads]) if compression.per_head else draw()
