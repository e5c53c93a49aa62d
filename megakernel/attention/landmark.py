"""Softmax over a token's current block and the landmarks of earlier blocks: the low-rank parent of causal FLuRKA."""

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
from megakernel.ops.documents import Positions
from megakernel.ops.landmark_attention import (
    MISSING,
    Landmarks,
    complete_blocks,
    landmark_attention,
    landmark_visibility,
)
from megakernel.ops.mixture import Rotation, pack_keys, packed_rotary, shifted
from megakernel.ops.tensors import accum_dtype
from megakernel.ops.window import LocalWindow, Tail, empty_tail


class LandmarkState(NamedTuple):
    """The state of a sequence: its last tokens, and the landmarks of every complete block."""

    tail: Tail
    landmarks: Landmarks | None


class LandmarkAttention(NearFarAttention):
    """Weights exp(q.k / sqrt(d)) on tokens of the window, and m exp(q.k~ / sqrt(d)) on landmarks k~ = E k_block."""

    def __init__(self, config: Attention, settings: LayerSettings):
        super().__init__(config, settings)
        assert config.compression is not None
        self.compressor = Compressor(config.compression, settings)
        self.mixture = build_mixture(config.mixture, settings)
        self.create_merge_parameters()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        size, length, positions = self.block_size, q.shape[2], inputs.resolved_positions
        priors, shift = priors_and_shift(self.mixture)
        flat, rotate = pack_keys(k), packed_rotary(inputs.rotary, self.head_dim)
        tail, before = inputs.state or (empty_tail(flat, v, self.reach), None)
        if inputs.cp_shard.size > 1:
            tail = inputs.halo(flat, v, self.reach)
        far = rotate if self.far_rope == "centroid" else None
        own = self._landmarks(flat, v, tail, positions, far)
        landmarks = gather_landmarks(inputs.cp_shard, own, length, before)
        out = landmark_attention(
            q,
            k,
            v,
            landmarks,
            landmark_visibility(positions, length, q.device, size=size, skipped=self.near.blocks),
            window=LocalWindow(size, self.near.blocks, rotate, far),
            tail=tail,
            token_count=size / self.rank,
            priors=priors,
            shift=shift,
            far_weight=getattr(self, "far_weight", None),
            gate=self.gate(q),
            positions=positions,
        )
        if not inputs.return_state:
            return out, None
        carried = landmarks.carried(own.ends.shape[1], positions, length, size)
        return out, LandmarkState(tail.after(flat, v), carried)

    def _landmarks(
        self, k: Tensor, v: Tensor, tail: Tail, positions: Positions, rotate: Rotation | None
    ) -> Landmarks:
        """Landmarks of the blocks that end among these tokens; k and v packed as in a `Tail`."""
        blocks = complete_blocks(positions, k.shape[2], k.device, self.block_size)
        # Sums over tokens: bfloat16 would keep 8 bits of them.
        dtype = accum_dtype(k.dtype)
        pools = [pool.to(dtype) for pool in self.compressor.pools(k).unbind(-3)]
        pools = [pool if pool.dim() == 2 else pool[:, None] for pool in pools]
        keys = shifted(pools[0] @ blocks.gather(tail.keys, k).to(dtype), priors_and_shift(self.mixture)[1])
        values = pools[-1] @ blocks.gather(tail.values, v).to(dtype)
        if rotate is not None:
            centers = blocks.last_positions() - (self.block_size - 1) / 2
            flat = rotate(keys.flatten(2, 3), centers.repeat_interleave(self.rank, 1))
            keys = flat.unflatten(2, (-1, self.rank))
        return Landmarks(keys, values, blocks.ends)


def gather_landmarks(
    cp_shard: ContextParallelShard, own: Landmarks, length: int, before: Landmarks | None
) -> Landmarks:
    """`before` and `own`, or those of all shards; ends are relative to the first of this shard's `length` tokens."""
    if cp_shard.size == 1:
        return own.appended_to(before)
    keys, values = (cp_shard.all_tokens(x.flatten(3)).unflatten(3, x.shape[3:]) for x in own[:2])
    ends = own.ends.expand(len(keys), -1)
    missing, global_ends = ends == MISSING, (ends + cp_shard.rank * length).double()
    gathered = cp_shard.all_tokens(torch.where(missing, -1.0, global_ends)[..., None])[..., 0]
    local_ends = torch.where(gathered < 0, MISSING, gathered.long() - cp_shard.rank * length)
    return Landmarks(keys, values, local_ends)
