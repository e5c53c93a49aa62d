"""Several keys at one position, and attention that weighs every pair (docs/formulas.md, 5 and 6)."""

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
from megakernel.ops import weighted_attention
from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.documents import Positions
from megakernel.ops.weighted_attention import responsibilities


class KeyMixture(FullPrecision):
    """The M keys at a position and how much each counts: shifts b of shifted keys, priors pi of a soft mixture."""

    weights: Tensor
    """(H_kv, M): pi before it is clamped, learned by gradients or set by the M-step."""

    counted: Tensor
    """(H_kv, M) float64: responsibilities since the last M-step."""

    def __init__(self, mixture: Mixture, settings: LayerSettings):
        super().__init__()
        kv_heads = settings.kv_heads
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
        """(B, H_kv, M, N, d) from that, or from (B, H_kv, N, d) where keys are shifted, then in float32 or better."""
        if not self.shifted:
            return k
        # A key and its shift have more digits than half precision has.
        dtype = accum_dtype(k.dtype)
        return k.to(dtype)[:, :, None] + self.shift.to(dtype)[:, :, None]

    def priors(self) -> Tensor:
        """pi (H_kv, M) in [0, 1], float32 or better."""
        assert self.soft
        return self.weights.to(accum_dtype(self.weights.dtype)).clamp(0, 1)

    def sharded_parameters(self) -> dict[str, int]:
        """Shifts and priors belong to key heads."""
        return dict.fromkeys(self.state_dict(), 0)

    def finish_step(self, total: Callable[[Tensor], Tensor]) -> None:
        """The M-step: priors become the mean responsibilities of all pairs counted since the last."""
        counted = total(self.counted)
        self.weights.copy_(counted / counted.sum(-1, keepdim=True))
        self.counted.zero_()


def build_mixture(form: Mixture | None, settings: LayerSettings) -> KeyMixture | None:
    """The mixture of one layer, for the key heads of one shard; None where one key stands at a position."""
    return None if form is None else KeyMixture(form, settings)


def priors_and_shift(mixture: KeyMixture | None) -> tuple[Tensor | None, Tensor | None]:
    """pi and b of an op that shifts keys itself, as late as it can; None for what does not exist."""
    if mixture is None:
        return None, None
    return mixture.priors(), mixture.shift if mixture.shifted else None


def keys_and_priors(mixture: KeyMixture | None, k: Tensor) -> tuple[Tensor, Tensor | None]:
    """The M keys at each position and what they count; k itself and None where one key stands there."""
    if mixture is None:
        return k, None
    return mixture.keys(k), mixture.priors() if mixture.soft else None


class PairwiseAttention(AttentionLayer):
    """Every pair weighed by a softmax or gaussian similarity, with one or M keys at a position.

    Shards of a sequence trade tokens for heads, so that each sees whole sequences.
    """

    def __init__(self, form: Attention, settings: LayerSettings):
        super().__init__(form, settings)
        assert form.similarity != "kernel"
        self.similarity, self.normalize = form.similarity, form.normalize
        self.variances = None if form.mixture is None else form.mixture.sigma2
        self.mixture = build_mixture(form.mixture, settings)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        dtype = v.dtype
        k, priors = keys_and_priors(self.mixture, k)
        q, v = q.to(k.dtype), v.to(k.dtype)
        q, k = inputs.rotated(q, k)
        ulysses = Ulysses(inputs.cp_shard, q.shape[1], k.shape[1])
        positions = ulysses.of_positions(inputs.at, q.shape[2])
        q, (k, v) = ulysses.of_queries(q), ulysses.of_keys(k, v)
        mass = None if priors is None else ulysses.of_key_heads(priors)[..., None]
        if inputs.padding_mask is not None:
            real = inputs.padding_mask[:, None, None].to(accum_dtype(q.dtype))
            mass = real if mass is None else mass * real
        out, state = weighted_attention(
            q,
            k,
            v,
            similarity=self.similarity,
            variances=self.variances,
            join="sum" if self.mixture is None or self.mixture.soft else "max",
            key_weights=mass,
            normalize=self.normalize,
            causal=self.causal,
            positions=positions,
            initial_state=inputs.state,
        )
        if self.mixture is not None and self.mixture.m_step and self.training:
            self._count(q, k, mass, inputs.padding_mask, positions, ulysses)
        return ulysses.cut(out.to(dtype)), state

    def finish_step(self, total: Callable[[Tensor], Tensor]) -> None:
        """See AttentionLayer."""
        if self.mixture is not None and self.mixture.m_step:
            self.mixture.finish_step(total)

    def _count(
        self,
        q: Tensor,
        k: Tensor,
        mass: Tensor | None,
        key_mask: Tensor | None,
        positions: Positions,
        ulysses: Ulysses,
    ) -> None:
        """Add the responsibilities of these tokens; what is computed again in backward counts twice for all alike."""
        shares = responsibilities(
            q,
            k,
            similarity=self.similarity,
            variances=self.variances,
            key_weights=mass,
            query_mask=key_mask,
            causal=self.causal,
            positions=positions,
        )
        assert self.mixture is not None
        counted = self.mixture.counted
        mine = shares.sum((0, 3), dtype=counted.dtype)
        owners = ulysses.of_key_heads(torch.eye(len(counted), dtype=mine.dtype, device=mine.device))
        counted += owners.T @ mine
