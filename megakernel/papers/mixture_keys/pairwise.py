"""Gaussian similarity and mixtures of keys over all pairs of tokens (docs/formulas.md, 6)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megakernel.attention.heads import LayerSettings
from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.layer import AttentionLayer
from megakernel.attention.mixture import build_mixture, keys_and_priors
from megakernel.attention.sequence import Ulysses
from megakernel.config.attention import Attention
from megakernel.ops.documents import Positions
from megakernel.ops.tensors import accum_dtype
from megakernel.ops.weighted_attention import responsibilities, weighted_attention
from megakernel.ops.weighted_attention.weights import Similarity


class PairwiseAttention(AttentionLayer):
    """Quadratic attention with a softmax or gaussian similarity and one or M keys per position.

    Context-parallel shards use the Ulysses all-to-all, so each sees whole sequences.
    """

    def __init__(self, config: Attention, settings: LayerSettings):
        super().__init__(config, settings)
        assert config.similarity != "kernel"
        self.similarity, self.normalize = config.similarity, config.normalize
        fixed = None if config.mixture is None else config.mixture.sigma2
        self.variances = fixed if isinstance(fixed, list) else None
        self.mixture = build_mixture(config.mixture, settings)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        dtype = v.dtype
        k, priors = keys_and_priors(self.mixture, k)
        q, v = q.to(k.dtype), v.to(k.dtype)
        q, k = inputs.rotated(q, k)
        ulysses = Ulysses(inputs.cp_shard, q.shape[1], k.shape[1])
        positions = ulysses.whole_positions(inputs.resolved_positions, q.shape[2])
        q, (k, v) = ulysses.exchange_queries(q), ulysses.exchange_keys(k, v)
        similarity = self.similarity
        if self.mixture is not None and (precisions := self.mixture.precisions()) is not None:
            q, k = as_products(q, k, ulysses.select_key_heads(precisions))
            similarity = "softmax"
        weights = None if priors is None else ulysses.select_key_heads(priors)[..., None]
        if inputs.padding_mask is not None:
            real = inputs.padding_mask[:, None, None].to(accum_dtype(q.dtype))
            weights = real if weights is None else weights * real
        out, state = weighted_attention(
            q,
            k,
            v,
            similarity=similarity,
            variances=self.variances,
            join="sum" if self.mixture is None or self.mixture.soft else "max",
            key_weights=weights,
            normalize=self.normalize,
            causal=self.causal,
            positions=positions,
            initial_state=inputs.state,
        )
        if self.mixture is not None and self.mixture.m_step and self.training:
            self._count(q, k, similarity, weights, inputs.padding_mask, positions, ulysses)
        return ulysses.restore(out.to(dtype)), state

    def finish_step(self, all_reduce: Callable[[Tensor], Tensor]) -> None:
        """See AttentionLayer."""
        if self.mixture is not None and self.mixture.m_step:
            self.mixture.finish_step(all_reduce)

    def _count(
        self,
        q: Tensor,
        k: Tensor,
        similarity: Similarity,
        key_weights: Tensor | None,
        query_mask: Tensor | None,
        positions: Positions,
        ulysses: Ulysses,
    ) -> None:
        """Add these tokens' responsibilities; recomputation in backward doubles them all, so their mean is the same."""
        shares = responsibilities(
            q,
            k,
            similarity=similarity,
            variances=self.variances,
            key_weights=key_weights,
            query_mask=query_mask,
            causal=self.causal,
            positions=positions,
        )
        assert self.mixture is not None
        counted = self.mixture.counted
        sums = shares.sum((0, 3), dtype=counted.dtype)
        # Ulysses heads may be a part or repetitions of the key heads: row i of `one_hot` is the key head of head i.
        one_hot = ulysses.select_key_heads(torch.eye(len(counted), dtype=sums.dtype, device=sums.device))
        counted += one_hot.T @ sums


def as_products(q: Tensor, k: Tensor, precisions: Tensor) -> tuple[Tensor, Tensor]:
    """Queries (B, H, N, d + 2) and keys (B, H_kv, M, N, d + 2) with q'.k' / sqrt(d + 2) = -p |q - k|^2 / (2 sqrt(d)).

    So that the precisions p (H_kv, M) have gradients: the op takes variances as constants. q: (B, H, N, d), k:
    (B, H_kv, M, N, d).
    """
    dtype, width = accum_dtype(k.dtype), q.shape[-1]
    q, k, p = q.to(dtype), k.to(dtype), precisions.to(dtype)[:, :, None, None]
    of_queries, of_keys = (x.square().sum(-1, keepdim=True) / 2 for x in (q, k))
    q = torch.cat([q, of_queries, torch.ones_like(of_queries)], -1) * ((width + 2) / width) ** 0.5
    return q, torch.cat([k, -torch.ones_like(of_keys), -of_keys], -1) * p
