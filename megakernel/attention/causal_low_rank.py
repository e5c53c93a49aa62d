"""Causal low-rank attention: a query attends to the landmarks of earlier blocks alone (docs/formulas.md, 4)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernel.attention.compression import Compressor
from megakernel.attention.heads import LayerSettings
from megakernel.attention.inputs import DEFAULT_INPUTS, AttentionInputs
from megakernel.attention.layer import AttentionLayer, SequenceState
from megakernel.attention.map_parameters import build_projection
from megakernel.attention.mixture import build_mixture, keys_and_priors
from megakernel.config.attention import Attention
from megakernel.ops.block_pooling import block_ends, chunk_count, pool_blocks, pool_open_block
from megakernel.ops.causal_low_rank_attention import causal_low_rank_attention
from megakernel.ops.documents import Positions, token_positions
from megakernel.ops.mixture import pack_keys, unpack_keys
from megakernel.ops.state import KernelState
from megakernel.ops.tensors import accum_dtype


class CausalLowRankState(NamedTuple):
    """The state of a sequence; its size does not depend on the number of tokens."""

    far: KernelState
    """Sums over the landmarks of the open document."""

    open_block: Tensor
    """Landmarks of the open block's tokens so far: (B, 1, p r, C) of the layer's input, p = 1 if E = F, else 2; or
    (B, H_kv, r, M d + D) of keys and values."""


class CausalLowRankAttention(AttentionLayer):
    """FLuRKA without a window, phi(Q) (phi(K~)^T V~) row-normalized over the landmarks of complete earlier blocks.

    With `compresses_input` K~ = (E X) W_K and V~ = (F X) W_V (FLuRKA eq. 2), so that a block of b tokens costs the
    projections of r keys and values; else K~ = E K and V~ = F V (eq. 1). Blocks restart at every document. Tokens of a
    document's first block see no landmark: their output is 0. All landmarks stand for b / r tokens, and are weighed
    against no window, so the landmark token count cancels.
    """

    def __init__(self, config: Attention, settings: LayerSettings):
        super().__init__(config, settings)
        assert config.compression is not None
        assert config.feature_map is not None
        self.compresses_input = config.compresses_input
        self.far_rope = config.far_rope
        self.compressor = Compressor(config.compression, settings)
        self.block_size, self.rank = self.compressor.block_size, self.compressor.rank
        self.projection = build_projection(config.feature_map, settings)
        self.mixture = build_mixture(config.mixture, settings)

    def key_count(self, tokens: int, shards: int) -> int:
        """See AttentionLayer; the landmarks of this shard's chunks, if they are made from the layer's input."""
        return self.rank * chunk_count(tokens, self.block_size) if self.compresses_input else tokens

    def compress(self, x: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        """Landmarks of the layer's input x (N, B, C), the tokens of this context-parallel shard.

        Returns E x and F x (2, C r, B, C), or (1, C r, B, C) if keys and values share E, in float32 or better; and
        `CausalLowRankState.open_block` after these tokens, None unless a state is needed.
        """
        pools = self.compressor.pools(x)
        tokens = x.transpose(0, 1)[:, None]
        (landmarks,), left = self._pooled((tokens,), (pools.flatten(0, 1),), inputs)
        of_chunks = landmarks[:, 0].unflatten(1, (-1, len(pools), self.rank))
        return of_chunks.permute(2, 1, 3, 0, 4).flatten(1, 2), left

    def forward(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs = DEFAULT_INPUTS) -> Tensor:
        """See AttentionLayer. ValueError for padding if k and v are landmarks, which `compress` makes without it."""
        if self.compresses_input and inputs.padding_mask is not None:
            raise ValueError(
                "padding_mask is not supported by a causal layer that compresses its input: put padding at the end, or "
                "build with compression: {compress: projected}"
            )
        return super().forward(q, k, v, inputs)

    def extend(self, *tensors: Any, **options: Any) -> tuple[Tensor, SequenceState]:
        """See AttentionLayer. ValueError if k and v are landmarks: `compress` has to see the same state."""
        if self.compresses_input:
            raise ValueError(
                "extend is not supported by a layer that compresses its input: use MultiheadAttention.step of "
                "megakernel.layers, or build with compression: {compress: projected}"
            )
        return super().extend(*tensors, **options)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer; k and v hold landmarks if the layer compresses its input."""
        dtype, positions, state = v.dtype, inputs.resolved_positions, inputs.state
        k, left = pack_keys(k), inputs.open_block
        if not self.compresses_input:
            # Sums over tokens that then enter an exponent: bfloat16 would keep 8 bits of them.
            k, v = (x.to(accum_dtype(x.dtype)) for x in (k, v))
            pools = self.compressor.pools(k)
            (k, v), left = self._pooled((k, v), (pools.select(-3, 0), pools.select(-3, -1)), inputs)
        keys = k if self.keys_per_head == 1 else unpack_keys(k, self.head_dim)
        keys, priors = keys_and_priors(self.mixture, keys)
        if inputs.rotary is not None and self.far_rope == "centroid":
            keys = inputs.rotary(keys.flatten(1, -3), self._centers(positions, q)).view_as(keys)
            q = inputs.rotary(q, token_positions(positions, q.shape[2], q.device))
        out, far = causal_low_rank_attention(
            q.to(keys.dtype),
            keys,
            v.to(keys.dtype),
            feature_map=self.projection.feature_map,
            block_size=self.block_size,
            projection=self.projection(),
            priors=priors,
            positions=positions,
            initial_state=None if state is None else state.far,
            return_state=inputs.return_state,
            exchange=inputs.exchange,
        )
        if not inputs.return_state:
            return out.to(dtype), None
        assert far is not None
        assert left is not None
        return out.to(dtype), CausalLowRankState(far, left)

    def _pooled(
        self, parts: tuple[Tensor, ...], pools: tuple[Tensor, ...], inputs: AttentionInputs
    ) -> tuple[list[Tensor], Tensor | None]:
        """Landmarks of the parts (B, H, N, .), and the open block's, if a state is needed, as one tensor."""
        shard, length, widths = inputs.cp_shard, parts[0].shape[2], [part.shape[3] for part in parts]
        positions = shard.rank * length if inputs.positions is None else inputs.positions
        entering = None if inputs.state is None else inputs.state.open_block
        # Shards of one document each have whole blocks.
        straddles = not isinstance(positions, int) or positions % self.block_size or length % self.block_size
        if shard.size > 1 and straddles:
            if length < self.block_size:
                raise ValueError(
                    f"a shard of {length} tokens is shorter than compression.block_size={self.block_size}; use fewer "
                    "shards or smaller blocks"
                )
            local = self._open_block(parts, pools, positions, None)
            # r landmarks instead of the b - 1 tokens that they are of.
            entering = shard.previous_tokens(local, local.shape[-2])
        of_parts = [None] * len(parts) if entering is None else entering.split(widths, -1)
        landmarks = [
            pool_blocks(part, pool, positions=positions, entering=before)
            for part, pool, before in zip(parts, pools, of_parts, strict=True)
        ]
        left = self._open_block(parts, pools, positions, entering) if inputs.return_state else None
        return landmarks, left

    @staticmethod
    def _open_block(
        parts: tuple[Tensor, ...], pools: tuple[Tensor, ...], positions: Positions, entering: Tensor | None
    ) -> Tensor:
        widths = [part.shape[3] for part in parts]
        of_parts = [None] * len(parts) if entering is None else entering.split(widths, -1)
        sums = [
            pool_open_block(part, pool, positions=positions, entering=before)
            for part, pool, before in zip(parts, pools, of_parts, strict=True)
        ]
        return sums[0] if len(sums) == 1 else torch.cat(sums, -1)

    def _centers(self, positions: Positions, like: Tensor) -> Tensor:
        """(B, C r) or (1, C r): position of the center of each landmark's block."""
        ends = block_ends(positions, like.shape[2], self.block_size, like.device)
        last = ends.positions.gather(-1, ends.place[..., None])[..., 0]
        return (last - (self.block_size - 1) / 2).repeat_interleave(self.rank, 1)
