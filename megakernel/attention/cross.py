"""Cross attention: queries of one sequence read the keys and values of another (docs/formulas.md, 13)."""

from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.attention.kernel import KernelAttention
from megakernel.attention.layer import AttentionLayer
from megakernel.attention.mixture import keys_and_priors
from megakernel.attention.softmax import SoftmaxAttention
from megakernel.ops.kernel_attention import kernel_attention
from megakernel.ops.softmax_attention import softmax_attention
from megakernel.ops.state import KernelState


class SourceKeys(NamedTuple):
    """What softmax keeps of the sequences that are read: it grows with them."""

    keys: Tensor
    """(B, H_kv, S, d)"""

    values: Tensor
    """(B, H_kv, S, D)"""

    real: Tensor
    """(B, S) bool, False for padding."""


SourceState = KernelState | SourceKeys
"""What a mechanism keeps of the sequences that are read; kernel attention the sums over their keys."""


def read_source(core: AttentionLayer, q: Tensor, source: SourceKeys) -> tuple[Tensor, SourceState]:
    """Attention of queries (B, H, N, d) to the real tokens of `source`: (B, H, N, D), and what `read_again` needs.

    core: a layer whose mechanism `reads_other_keys`, built with causal=False. Its `source.keys` are
    (B, H_kv, M, S, d) if it expects M keys per position.
    """
    if isinstance(core, KernelAttention):
        return _by_kernel(core, q, source, None)
    assert isinstance(core, SoftmaxAttention), type(core)
    keys, values, real = source
    out, _ = softmax_attention(q, keys, values, causal=False, key_mask=real, softcap=core.softcap)
    return out, source


def read_again(core: AttentionLayer, q: Tensor, state: SourceState) -> Tensor:
    """`read_source` for further queries (B, H, N, d) of the same sequences."""
    if not isinstance(state, KernelState):
        return read_source(core, q, state)[0]
    assert isinstance(core, KernelAttention), type(core)
    batch, width = q.shape[0], q.shape[-1]
    several = (core.keys_per_head,) if core.keys_per_head > 1 else ()
    # The op adds keys to a state before it reads it: here one, of weight 0.
    keys = q.new_zeros(batch, len(core.kv_heads), *several, 1, width)
    values = q.new_zeros(batch, len(core.kv_heads), 1, state.sums.shape[-1] - 1)
    nothing = SourceKeys(keys, values, torch.zeros(batch, 1, dtype=torch.bool, device=q.device))
    return _by_kernel(core, q, nothing, state)[0]


def _by_kernel(
    core: KernelAttention, q: Tensor, source: SourceKeys, state: KernelState | None
) -> tuple[Tensor, KernelState]:
    k, priors = keys_and_priors(core.mixture, source.keys)
    result = kernel_attention(
        q.to(k.dtype),
        k,
        source.values.to(k.dtype),
        feature_map=core.projection.feature_map,
        projection=core.projection(),
        priors=priors,
        causal=False,
        key_weights=source.real[:, None].to(k.dtype),
        initial_state=state,
        return_state=True,
        cross=True,
    )
    assert isinstance(result, tuple)
    return result[0].to(q.dtype), result[1]
