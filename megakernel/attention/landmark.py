"""The low-rank parent of causal FLuRKA: softmax over a token's current block and the landmarks of earlier ones."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernel.attention.compression import Compressor
from megakernel.attention.heads import LayerSettings
from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.mixture import build_mixture, priors_and_shift
from megakernel.attention.near_far import NearFarAttention
from megakernel.attention.sequence import ContextParallelShard
from megakernel.config.attention import Attention
from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.documents import Positions
from megakernel.ops.landmark_attention import MISSING, Landmarks, complete_blocks, landmark_attention, sight
from megakernel.ops.mixture import Rotary as Rotation
from megakernel.ops.mixture import pack_keys, rotated_each, shifted
from megakernel.ops.window import LocalWindow, Tail, empty_tail


class LandmarkState(NamedTuple):
    """What a sequence carries: its last tokens, and the landmarks of every complete block."""

    tail: Tail
    landmarks: Landmarks | None


class LandmarkAttention(NearFarAttention):
    """Weights exp(q.k / sqrt(d)) of near tokens, and m exp(q.k~ / sqrt(d)) of landmarks k~ = E k_block."""

    def __init__(self, form: Attention, settings: LayerSettings):
        super().__init__(form, settings)
        assert form.compression is not None
        self.compressor = Compressor(form.compression, settings)
        self.mixture = build_mixture(form.mixture, settings)
        self.learn_join()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        size, length, positions = self.block_size, q.shape[2], inputs.at
        priors, shift = priors_and_shift(self.mixture)
        flat, rotate = pack_keys(k), rotated_each(inputs.rotary, self.head_dim)
        tail, before = inputs.state or (empty_tail(flat, v, self.reach), None)
        if inputs.cp_shard.size > 1:
            tail = inputs.halo(flat, v, self.reach)
        far = rotate if self.far_rope == "centroid" else None
        own = self._landmarks(flat, v, tail, positions, far)
        landmarks = gathered(inputs.cp_shard, own, length, before)
        out = landmark_attention(
            q,
            k,
            v,
            landmarks,
            sight(positions, length, q.device, size=size, skipped=self.near.blocks),
            window=LocalWindow(size, self.near.blocks, rotate, far),
            tail=tail,
            token_count=size / self.rank,
            priors=priors,
            shift=shift,
            far_weight=getattr(self, "far_weight", None),
            gate=self.gate(q),
            positions=positions,
        )
        return out, LandmarkState(tail.after(flat, v), landmarks.moved(length))

    def _landmarks(
        self, k: Tensor, v: Tensor, tail: Tail, positions: Positions, rotate: Rotation | None
    ) -> Landmarks:
        """Those of the blocks that end among these tokens; k and v as they stand in a tail."""
        found = complete_blocks(positions, k.shape[2], k.device, self.block_size)
        # Sums over tokens, of which half precision would leave 8 bits.
        dtype = accum_dtype(k.dtype)
        pools = [pool.to(dtype) for pool in self.compressor.pools(k).unbind(-3)]
        pools = [pool if pool.dim() == 2 else pool[:, None] for pool in pools]
        keys = shifted(pools[0] @ found.of(tail.keys, k).to(dtype), priors_and_shift(self.mixture)[1])
        values = pools[-1] @ found.of(tail.values, v).to(dtype)
        if rotate is not None:
            centres = found.last_positions() - (self.block_size - 1) / 2
            flat = rotate(keys.flatten(2, 3), centres.repeat_interleave(self.rank, 1))
            keys = flat.unflatten(2, (-1, self.rank))
        return Landmarks(keys, values, found.ends)


def gathered(
    cp_shard: ContextParallelShard, own: Landmarks, length: int, before: Landmarks | None
) -> Landmarks:
    """`before` and `own`; of shards those of all, ends counted from the first of this one's `length` tokens."""
    if cp_shard.size == 1:
        return own.after(before)
    keys, values = (cp_shard.all_tokens(x.flatten(3)).unflatten(3, x.shape[3:]) for x in own[:2])
    ends = own.ends.expand(len(keys), -1)
    missing, places = ends == MISSING, (ends + cp_shard.rank * length).double()
    told = cp_shard.all_tokens(torch.where(missing, -1.0, places)[..., None])[..., 0]
    here = torch.where(told < 0, MISSING, told.long() - cp_shard.rank * length)
    return Landmarks(keys, values, here)
