"""Bidirectional low-rank attention: every query attends to the same landmarks (docs/formulas.md, 3 and 4)."""

from typing import Any, cast

import torch
from torch import Tensor

from megakernel.attention.compression import CompressedKV, Compressor
from megakernel.attention.heads import LayerSettings
from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.layer import AttentionLayer
from megakernel.attention.map_parameters import build_projection
from megakernel.attention.mixture import build_mixture, keys_and_priors
from megakernel.attention.sequence import ContextParallelShard
from megakernel.config.attention import Attention
from megakernel.ops.documents import token_positions
from megakernel.ops.kernel_attention import kernel_attention
from megakernel.ops.mixture import pack_keys, unpack_keys
from megakernel.ops.softmax_attention import softmax_attention
from megakernel.ops.tensors import accum_dtype
from megakernel.ops.weighted_attention import weighted_attention


class LowRankAttention(AttentionLayer):
    """Linformer, softmax(Q (E K)^T / sqrt(d)) (F V), and FLuRKA, phi(Q) (phi(K~)^T V~) row-normalized.

    With `compresses_input` K~ = (E X) W_K and V~ = (F X) W_V (FLuRKA eq. 2), else K~ = E K and V~ = F V (eq. 1).
    A sequence is one document: landmarks mix all of its tokens. Mixture keys are keys of landmarks, k~_r = (E X) W_r or
    k~ + b_r, so that both equations agree whatever the rows of E sum to.
    """

    def __init__(self, config: Attention, settings: LayerSettings):
        super().__init__(config, settings)
        assert config.compression is not None
        self.compresses_input = config.compresses_input
        self.far_rope = config.far_rope
        self.compressor = Compressor(config.compression, settings)
        self.mixture = build_mixture(config.mixture, settings)
        self.projection = None
        if config.feature_map is not None:
            self.projection = build_projection(config.feature_map, settings)

    def compress(self, x: Tensor, *, first: int, length: int) -> Tensor:
        """Contribution of n tokens of the layer's input to its landmarks.

        x: (n, B, C), the tokens from index `first` on of sequences of `length` tokens, 0 for padding. Returns E x and
        F x (2, L, B, C), or (1, L, B, C) if keys and values share E, in float32 or better; contributions of the parts
        of a sequence add up.
        """
        flat = self.compressor((x.flatten(1),), first=first, length=length)
        return torch.stack(flat).unflatten(-1, x.shape[1:])

    def key_count(self, tokens: int) -> int:
        """See AttentionLayer; the landmarks, if they are made from the layer's input."""
        if not self.compresses_input:
            return tokens
        return self.compressor.rank * -(-tokens // self.compressor.block_size)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer; k and v hold landmarks if the layer compresses its input."""
        length, counts, rotary = q.shape[2] * inputs.cp_shard.size, inputs.counts, inputs.rotary
        k = pack_keys(k)
        if not self.compresses_input:
            k, v = self._compress_kv(k, v, inputs)
        landmarks = self.compressor.finish(k, v, length=length, counts=counts)
        keys = landmarks.keys if self.keys_per_head == 1 else unpack_keys(landmarks.keys, self.head_dim)
        keys, priors = keys_and_priors(self.mixture, keys)
        if rotary is not None and self.far_rope == "centroid":
            q = rotary(q, token_positions(inputs.resolved_positions, q.shape[2], q.device))
            keys = rotary(keys.flatten(1, -3), self._block_centers(length, counts, q)).view_as(keys)
        # Shifted keys are in float32 or better, and ops want one dtype.
        landmarks = landmarks._replace(keys=keys, values=landmarks.values.to(keys.dtype))
        return self._attend(q, landmarks, priors, counts, inputs.cp_shard), None

    def _attend(
        self,
        q: Tensor,
        landmarks: CompressedKV,
        priors: Tensor | None,
        counts: Tensor | None,
        cp_shard: ContextParallelShard,
    ) -> Tensor:
        """Output (B, H, N, D); with priors (H_kv, M) landmark keys are (B, H_kv, M, L, d)."""
        keys, values, weights = landmarks
        queries = q.to(keys.dtype)
        if self.projection is None and priors is None:
            return softmax_attention(queries, keys, values, causal=False, key_weights=weights)[0].to(q.dtype)
        if self.projection is None:
            assert priors is not None
            mixed = priors[..., None] if weights is None else priors[..., None] * weights[:, None, None]
            return weighted_attention(
                queries, keys, values, similarity="softmax", key_weights=mixed, causal=False
            )[0].to(q.dtype)
        out = kernel_attention(
            queries,
            keys,
            values,
            feature_map=self.projection.feature_map,
            projection=self.projection(),
            causal=False,
            key_weights=None if weights is None else weights[:, None],
            priors=priors,
        )
        return cast(Tensor, out).to(q.dtype)

    def _compress_kv(self, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        # Sums over tokens that then enter an exponent: bfloat16 would keep 8 bits of them.
        k, v = (x.to(accum_dtype(x.dtype)) for x in (k, v))
        cp_shard, real = inputs.cp_shard, inputs.padding_mask
        if real is not None:
            k, v = (x * real[:, None, :, None].to(x.dtype) for x in (k, v))
        tokens = k.shape[2]
        parts = self.compressor((k, v), first=cp_shard.rank * tokens, length=cp_shard.size * tokens)
        # One all-reduce for both.
        keys, values = cp_shard.all_reduce(torch.cat(parts, -1)).split([k.shape[-1], v.shape[-1]], -1)
        return keys, values

    def _block_centers(self, length: int, counts: Tensor | None, like: Tensor) -> Tensor:
        """(B, L) or (1, L): mean position of the real tokens of each landmark's block."""
        size, rank = self.compressor.block_size, self.compressor.rank
        starts = torch.arange(0, length, size, device=like.device)
        ends = torch.full((1,), length, device=like.device) if counts is None else counts
        last = torch.minimum(starts + size, ends[:, None]).clamp(min=1) - 1
        return ((starts + last) / 2).repeat_interleave(rank, 1)
