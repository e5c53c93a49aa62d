"""Kernel attention: weights phi(q).phi(k) and a running sum as state."""

from typing import Any

from torch import Tensor

from megakernel.attention.heads import LayerSettings
from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.layer import AttentionLayer
from megakernel.attention.map_parameters import build_projection
from megakernel.attention.mixture import build_mixture, keys_and_priors
from megakernel.config.attention import Attention
from megakernel.ops.kernel_attention import kernel_attention


class KernelAttention(AttentionLayer):
    """phi(q)^T sum phi(k) v^T over phi(q)^T sum phi(k) (docs/formulas.md, 2).

    Context-parallel shards exchange prefix states, and suffix states too if the layer is bidirectional.
    """

    def __init__(self, config: Attention, settings: LayerSettings):
        super().__init__(config, settings)
        assert config.feature_map is not None
        self.projection = build_projection(config.feature_map, settings)
        self.mixture = build_mixture(config.mixture, settings)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        dtype = v.dtype
        k, priors = keys_and_priors(self.mixture, k)
        real = inputs.padding_mask
        q, v = q.to(k.dtype), v.to(k.dtype)
        q, k = inputs.rotated(q, k)
        result = kernel_attention(
            q,
            k,
            v,
            feature_map=self.projection.feature_map,
            projection=self.projection(),
            priors=priors,
            causal=self.causal,
            key_weights=None if real is None else real[:, None].to(v.dtype),
            positions=inputs.resolved_positions,
            initial_state=inputs.state,
            return_state=inputs.return_state,
            exchange=inputs.exchange,
            exchange_after=None if self.causal else inputs.exchange_after,
        )
        out, state = result if isinstance(result, tuple) else (result, None)
        return out.to(dtype), state
