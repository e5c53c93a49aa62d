"""Kernel attention: phi(q).phi(k) with a running sum as state."""

from typing import Any

from torch import Tensor

from megakernel.attention.features import build_projection
from megakernel.attention.heads import LayerSettings
from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.layer import AttentionLayer
from megakernel.attention.mixture import build_mixture, keys_and_priors
from megakernel.config.attention import Attention
from megakernel.ops import kernel_attention


class KernelAttention(AttentionLayer):
    """phi(q)^T sum phi(k) v^T over phi(q)^T sum phi(k) (docs/formulas.md, 2).

    Shards of a sequence exchange the states of what lies before each, and behind it where tokens see both ways.
    """

    def __init__(self, form: Attention, settings: LayerSettings):
        super().__init__(form, settings)
        assert form.feature_map is not None
        self.projection = build_projection(form.feature_map, settings)
        self.mixture = build_mixture(form.mixture, settings)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        dtype = v.dtype
        k, priors = keys_and_priors(self.mixture, k)
        real = inputs.padding_mask
        q, v = q.to(k.dtype), v.to(k.dtype)
        q, k = inputs.rotated(q, k)
        found = kernel_attention(
            q,
            k,
            v,
            feature_map=self.projection.feature_map,
            projection=self.projection(),
            priors=priors,
            causal=self.causal,
            key_weights=None if real is None else real[:, None].to(v.dtype),
            positions=inputs.at,
            initial_state=inputs.state,
            return_state=inputs.wants_state,
            exchange=inputs.exchange,
            exchange_after=None if self.causal else inputs.exchange_after,
        )
        out, state = found if isinstance(found, tuple) else (found, None)
        return out.to(dtype), state
