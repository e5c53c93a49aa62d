"""The gated delta rule: a decaying state in which writing a key replaces its previous value."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.sequence import ContextParallelShard
from megakernel.attention.simple_gla import SimpleGlaAttention
from megakernel.ops.gated_delta_rule import gated_delta_rule
from megakernel.ops.layers import rms_norm
from megakernel.ops.tensors import accum_dtype


class GatedDeltaAttention(SimpleGlaAttention):
    """The layer of `simple_gla.update: delta`, with L2-normalized queries and keys (docs/formulas.md, 9).

    The last number of the layer's further projection is the logit of beta, the write strength; the one before it is the
    logit of the decay. Context-parallel shards gather each other's affine state updates.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        q, k = inputs.rotated(q, k)
        assert inputs.further is not None
        log_decay, _ = self.log_decay_and_step(inputs, k)
        out, state = gated_delta_rule(
            _l2_normalized(q),
            _l2_normalized(k),
            v,
            log_decay,
            inputs.further[..., -1].to(accum_dtype(k.dtype)).sigmoid(),
            positions=inputs.resolved_positions,
            initial_state=inputs.state,
            exchange=partial(_incoming_state, inputs.cp_shard) if inputs.cp_shard.size > 1 else None,
        )
        return out, state


def _l2_normalized(x: Tensor) -> Tensor:
    """x / |x| in the dtype of x; with eps, zero vectors stay zero and have a finite gradient."""
    width = x.shape[-1]
    return rms_norm(x, x.new_zeros(width), 1e-6 / width, offset=width**-0.5)


def _incoming_state(shard: ContextParallelShard, a: Tensor, s: Tensor) -> Tensor:
    """The state that enters this shard: each shard maps E to A E + S, A (B, H_kv, d, d) and S (B, H_kv, d, D)."""
    maps = shard.all_tokens(torch.cat([a, s], -1)).unflatten(2, (shard.size, -1))
    state, states = torch.zeros_like(s), []
    for rank in range(shard.size):
        states.append(state)
        state = maps[:, :, rank, :, : a.shape[-1]] @ state + maps[:, :, rank, :, a.shape[-1] :]
    # Indexing a stack makes the first shard, whose own state is constant, take part in the others' backward.
    return torch.stack(states)[shard.rank]
