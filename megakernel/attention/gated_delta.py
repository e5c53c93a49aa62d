"""The gated delta rule: a state that decays, and in which a key's value takes the place of the one before."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.sequence import ContextParallelShard
from megakernel.attention.simple_gla import SimpleGlaAttention
from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.gated_delta_rule import gated_delta_rule


class GatedDeltaAttention(SimpleGlaAttention):
    """The layer of `simple_gla.update: delta`, with queries and keys of length 1 (docs/formulas.md, 9).

    The last number of the layer's further projection is the logit of how much a token writes; the decay has the one
    before it. Shards of a sequence gather each other's maps of a state.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        q, k = inputs.rotated(q, k)
        dtype = accum_dtype(k.dtype)
        log_decay, _ = self.log_decay_and_step(inputs, k)
        logits = k.new_zeros(1) if inputs.further is None else inputs.further[..., -1]
        out, state = gated_delta_rule(
            _unit(q),
            _unit(k),
            v,
            log_decay,
            logits.to(dtype).sigmoid(),
            positions=inputs.at,
            initial_state=inputs.state,
            exchange=partial(_entering, inputs.cp_shard) if inputs.cp_shard.size > 1 else None,
        )
        return out, state


def _unit(x: Tensor) -> Tensor:
    """x over its length, in its dtype; eps keeps a vector of zeros one, and its gradient finite."""
    exact = x.to(accum_dtype(x.dtype))
    return (exact * (exact.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


def _entering(shard: ContextParallelShard, through: Tensor, own: Tensor) -> Tensor:
    """What enters this shard, where each makes A E + S of E; A `through` (B, H_kv, d, d), S `own` (B, H_kv, d, D)."""
    maps = shard.all_tokens(torch.cat([through, own], -1)).unflatten(2, (shard.size, -1))
    state, states = torch.zeros_like(own), []
    for rank in range(shard.size):
        states.append(state)
        state = maps[:, :, rank, :, : through.shape[-1]] @ state + maps[:, :, rank, :, through.shape[-1] :]
    # Of all shards, so that the first one, which nothing enters, takes part in the backward of the others.
    return torch.stack(states)[shard.rank]
