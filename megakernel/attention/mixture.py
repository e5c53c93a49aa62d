"""Several keys per position, and attention over all pairs (docs/formulas.md, 5 and 6)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megakernel.attention.heads import LayerSettings, generator
from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.layer import AttentionLayer, FullPrecision
from megakernel.attention.sequence import Ulysses
from megakernel.config.algebra import Mixture
from megakernel.config.attention import Attention
from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.documents import Positions
from megakernel.ops.weighted_attention import responsibilities, weighted_attention


class KeyMixture(FullPrecision):
    """Parameters of the M keys of a position: shifts b of shifted keys, priors pi of a soft mixture."""

    weights: Tensor
    """(H_kv, M): pi before clamping, learned by gradients or set by the M-step."""

    counted: Tensor
    """(H_kv, M) float64: sums of responsibilities since the last M-step."""

    def __init__(self, mixture: Mixture, settings: LayerSettings):
        super().__init__()
        self.heads, kv_heads = settings.heads, settings.kv_heads
        self.shifted = mixture.kind == "shifted"
        device = torch.get_default_device()
        if self.shifted:
            streams = [generator(settings.seed, head, "shift") for head in kv_heads]
            shape = (mixture.keys, settings.head_dim)
            draws = [torch.randn(shape, generator=stream, device="cpu") for stream in streams]
            self.shift = nn.Parameter(torch.stack(draws).to(device))
        self.soft = mixture.estep == "soft"
        self.m_step = mixture.m_step
        if self.soft:
            equal = torch.full((len(kv_heads), mixture.keys), 1 / mixture.keys)
            if self.m_step:
                self.register_buffer("weights", equal)
                self.register_buffer("counted", torch.zeros_like(equal).double(), persistent=False)
            else:
                self.weights = nn.Parameter(equal)

    def keys(self, k: Tensor) -> Tensor:
        """The keys (B, H_kv, M, N, d): k itself, or k (B, H_kv, N, d) plus the shifts in float32 or better."""
        if not self.shifted:
            return k
        # Half precision could round a small shift away.
        dtype = accum_dtype(k.dtype)
        return k.to(dtype)[:, :, None] + self.shifts().to(dtype)[:, :, None]

    def shifts(self) -> Tensor:
        """b (H_kv, M, d) of shifted keys."""
        return self.heads.of_key_head(self.shift)

    def priors(self) -> Tensor:
        """pi (H_kv, M) in [0, 1], float32 or better."""
        assert self.soft
        return self.heads.of_key_head(self.weights).to(accum_dtype(self.weights.dtype)).clamp(0, 1)

    def sharded_parameters(self) -> dict[str, int]:
        """Name -> dimension that counts heads: all of them."""
        return dict.fromkeys(self.state_dict(), 0)

    def finish_step(self, all_reduce: Callable[[Tensor], Tensor]) -> None:
        """The M-step: set priors to the mean responsibilities of all pairs since the last M-step.

        A head keeps its priors if there were none, or if queries or keys were not finite.
        """
        counted = all_reduce(self.counted)
        total = counted.sum(-1, keepdim=True)
        self.weights.copy_(torch.where((total > 0) & total.isfinite(), counted / total, self.weights))
        self.counted.zero_()


def build_mixture(config: Mixture | None, settings: LayerSettings) -> KeyMixture | None:
    """The mixture of one layer for the key heads of one shard; None with one key per position."""
    return None if config is None else KeyMixture(config, settings)


def priors_and_shift(mixture: KeyMixture | None) -> tuple[Tensor | None, Tensor | None]:
    """pi and b for an op that shifts keys itself; None for those that the mixture lacks."""
    if mixture is None:
        return None, None
    return mixture.priors(), mixture.shifts() if mixture.shifted else None


def keys_and_priors(mixture: KeyMixture | None, k: Tensor) -> tuple[Tensor, Tensor | None]:
    """The M keys of each position and their priors; k itself and None without a mixture."""
    if mixture is None:
        return k, None
    return mixture.keys(k), mixture.priors() if mixture.soft else None


class PairwiseAttention(AttentionLayer):
    """Quadratic attention with a softmax or gaussian similarity and one or M keys per position.

    Context-parallel shards use the Ulysses all-to-all, so each sees whole sequences.
    """

    def __init__(self, config: Attention, settings: LayerSettings):
        super().__init__(config, settings)
        assert config.similarity != "kernel"
        self.similarity, self.normalize = config.similarity, config.normalize
        self.variances = None if config.mixture is None else config.mixture.sigma2
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
        weights = None if priors is None else ulysses.select_key_heads(priors)[..., None]
        if inputs.padding_mask is not None:
            real = inputs.padding_mask[:, None, None].to(accum_dtype(q.dtype))
            weights = real if weights is None else weights * real
        out, state = weighted_attention(
            q,
            k,
            v,
            similarity=self.similarity,
            variances=self.variances,
            join="sum" if self.mixture is None or self.mixture.soft else "max",
            key_weights=weights,
            normalize=self.normalize,
            causal=self.causal,
            positions=positions,
            initial_state=inputs.state,
        )
        if self.mixture is not None and self.mixture.m_step and self.training:
            self._count(q, k, weights, inputs.padding_mask, positions, ulysses)
        return ulysses.restore(out.to(dtype)), state

    def finish_step(self, all_reduce: Callable[[Tensor], Tensor]) -> None:
        """See AttentionLayer."""
        if self.mixture is not None and self.mixture.m_step:
            self.mixture.finish_step(all_reduce)

    def _count(
        self,
        q: Tensor,
        k: Tensor,
        key_weights: Tensor | None,
        query_mask: Tensor | None,
        positions: Positions,
        ulysses: Ulysses,
    ) -> None:
        """Add these tokens' responsibilities; recomputation in backward doubles them all, so their mean is the same."""
        shares = responsibilities(
            q,
            k,
            similarity=self.similarity,
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
