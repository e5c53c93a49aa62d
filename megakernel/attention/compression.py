"""E and F of a layer, which compress keys and values along the sequence (docs/formulas.md, 3)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megakernel.attention.heads import LayerSettings, generator
from megakernel.attention.layer import FullPrecision
from megakernel.config.algebra import BlockCompression, Compression, LinformerCompression
from megakernel.ops.low_rank import compress
from megakernel.ops.tensors import accum_dtype

SEGMENT_WEIGHT = 0.9
"""Share of a landmark's initial weight that lies on its own segment of the block."""


def landmark_segments(rank: int, block_size: int, device: torch.device | None = None) -> Tensor:
    """(r, b) bool: whether the token lies in the landmark's segment of the block, b / r tokens."""
    tokens, landmarks = (torch.arange(count, device=device) for count in (block_size, rank))
    return tokens * rank // block_size == landmarks[:, None]


def pooling_logits(rank: int, block_size: int) -> Tensor:
    """Initial logits (r, b) of E and F, whose rows are softmaxed.

    Landmark s starts as the mean of its own segment of b / r tokens: identical landmarks would receive equal gradients
    and stay identical. A tenth of the weight lies on the rest of the block, so that every token gets a gradient. With
    r = b, landmark s is token s up to rounding (e^-40 on the others), and the layer starts as exact attention.
    """
    segments = landmark_segments(rank, block_size)
    if rank == block_size:
        return torch.where(segments, 0.0, -40.0)
    inside = segments.sum(1, keepdim=True)
    outside = (block_size - inside).clamp(min=1)
    gap = torch.log(SEGMENT_WEIGHT / inside) - torch.log((1 - SEGMENT_WEIGHT) / outside)
    return torch.where(segments, 0.0, -gap)


class CompressedKV(NamedTuple):
    """Compressed keys and values."""

    keys: Tensor
    """(B, H_kv, L, d)"""

    values: Tensor
    """(B, H_kv, L, D)"""

    token_counts: Tensor | None
    """(B, L) or (1, L): the number of tokens that each landmark stands for; None if all are equal."""


class Compressor(FullPrecision):
    """E and F: learned, except for the means of `pool`.

    Rows of `block` and `pool` sum to 1, so a constant stays constant; in a block that the sequence ends inside, the
    weights of the real tokens sum to 1. Linformer's E is unconstrained and starts as N(0, 1 / d_k).
    """

    def __init__(self, compression: Compression, settings: LayerSettings):
        super().__init__()
        self.heads, max_positions = settings.heads, settings.max_positions
        self.compression = compression
        self.per_head = getattr(compression, "per_head", False)
        self._owner: tuple[Compressor] | None = None
        """An earlier layer's, whose matrices this one uses; in a tuple, so that it is no part of this module."""
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
        # One tensor, so that E and F can be applied to the same input in one product.
        self.matrices = nn.Parameter(both[..., :1, :, :].clone() if compression.share_kv else both)

    def use_matrices_of(self, owner: "Compressor") -> None:
        """Have the E and F of an earlier layer with the same compression instead of one's own."""
        self.matrices, self._owner = None, (owner,)

    def sharded_parameters(self) -> dict[str, int]:
        """Name -> dimension that counts heads: E and F, if they are per head."""
        return {name: 0 for name, _ in self.named_parameters() if self.per_head}

    def pools(self, like: Tensor) -> Tensor:
        """E and F, or E alone (p = 1) if keys and values share it: (p, r, b) or (H_kv, p, r, b).

        like: gives device and dtype. Normalized rows are float32 or better; Linformer's are the parameter, not a copy.
        """
        learned = self.matrices if self._owner is None else self._owner[0].matrices
        if learned is None:
            return like.new_full((1, 1, self.block_size), 1 / self.block_size, dtype=accum_dtype(like.dtype))
        passed = self.heads.of_key_head if self.per_head else self.heads.shared
        matrices = passed(learned)
        matrices = matrices.to(like.device)
        return matrices.to(accum_dtype(matrices.dtype)).softmax(-1) if self.normalized else matrices

    def forward(self, parts: tuple[Tensor, ...], *, first: int, length: int) -> tuple[Tensor, ...]:
        """Contribution of the tokens from index `first` on to the landmarks of sequences of `length` tokens.

        parts: one tensor (..., n, c), to which both E and F are applied, or the keys and the values.
        Returns E x and F x, (..., L, c) in float32 or better; E x alone if `parts` is one tensor and E = F.
        """
        if not self.normalized and length > self.block_size:
            raise ValueError(
                f"sequences of {length} tokens exceed max_positions={self.block_size}, linformer's columns; "
                "raise model.max_positions or shorten the sequences"
            )
        pools = self.pools(parts[0])
        if len(parts) == 1:
            # One product, [E; F] x, reads the tokens once in forward and once in backward.
            both = compress(parts[0], pools.flatten(-3, -2), first=first, length=length)
            blocks = both.unflatten(-2, (-1, pools.shape[-3], self.rank))
            return tuple(x.flatten(-3, -2) for x in blocks.unbind(-3))
        pool_of_part = [pools.select(-3, min(i, pools.shape[-3] - 1)) for i in range(len(parts))]
        return tuple(compress(x, pool, first=first, length=length) for x, pool in zip(parts, pool_of_part))

    def finish(self, keys: Tensor, values: Tensor, *, length: int, counts: Tensor | None) -> CompressedKV:
        """Landmarks from complete sums (B, H_kv, L, .) over `length` tokens, of which `counts` (B,) are real."""
        if not self.normalized or (counts is None and length % self.block_size == 0):
            return CompressedKV(keys, values, None)
        if counts is None:
            counts = torch.full((1,), length, device=keys.device)
        blocks = torch.arange(keys.shape[2] // self.rank, device=keys.device)
        real = (counts[:, None] - blocks * self.block_size).clamp(0, self.block_size)
        pools = self.pools(keys)
        keys = keys / self._real_weights(pools.select(-3, 0), real).to(keys.dtype)
        values = values / self._real_weights(pools.select(-3, -1), real).to(values.dtype)
        token_counts = (real.to(accum_dtype(keys.dtype)) / self.rank).repeat_interleave(self.rank, 1)
        return CompressedKV(keys, values, token_counts)

    def _real_weights(self, pool: Tensor, real: Tensor) -> Tensor:
        """(B, 1 or H_kv, L, 1): weight on the first `real` (B, blocks) tokens of each block; 1 if there are none."""
        sums = nn.functional.pad(pool.cumsum(-1), (1, 0), value=0.0)
        sums = sums if sums.dim() == 3 else sums[None]
        weights = sums[..., real].permute(2, 0, 3, 1).flatten(2)[..., None]
        return weights.masked_fill(weights == 0, 1.0)


def shared_compressors(model: nn.Module) -> list[Compressor]:
    """Those whose compression has `share_layers`, in the order of the layers."""
    compressors = (module for module in model.modules() if isinstance(module, Compressor))
    return [one for one in compressors if getattr(one.compression, "share_layers", False)]


def share_over_layers(model: nn.Module) -> None:
    """Let layers of one compression with `share_layers` use the E and F of the first of them."""
    owners: dict[Compression, Compressor] = {}
    for compressor in shared_compressors(model):
        owner = owners.setdefault(compressor.compression, compressor)
        if owner is not compressor:
            compressor.use_matrices_of(owner)


def _gaussian(compression: LinformerCompression, columns: int, settings: LayerSettings) -> Tensor:
    """E and F ~ N(0, 1 / d_k), (2, d_k, N), or (H_kv, 2, d_k, N) per key head."""

    def draw(*head: int) -> Tensor:
        both = torch.randn(
            2,
            compression.rank,
            columns,
            generator=generator(settings.seed, *head, "linformer"),
            dtype=torch.float64,
            device="cpu",
        )
        return both.to(torch.get_default_device()).float() * compression.rank**-0.5

    return torch.stack([draw(head) for head in settings.kv_heads]) if compression.per_head else draw()
