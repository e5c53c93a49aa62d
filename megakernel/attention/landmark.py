"""The low-rank parent of causal FLuRKA: softmax over a token's own block and the landmarks of earlier ones."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megakernel.attention.compression import Compressor
from megakernel.attention.heads import HeadShard, Seed
from megakernel.attention.layer import AttentionLayer, Properties
from megakernel.attention.local import halo
from megakernel.attention.mixture import build_mixture, priors_and_shift, sharded_mixture
from megakernel.attention.rotary import Rotary
from megakernel.attention.sequence import ContextParallelShard
from megakernel.config.attention import Attention
from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.documents import Positions
from megakernel.ops.landmark_attention import landmark_attention
from megakernel.ops.landmark_attention.form import MISSING, Landmarks, Near, complete_blocks, sight
from megakernel.ops.mixture import Rotary as Rotation
from megakernel.ops.mixture import pack_keys, rotated_each, shifted
from megakernel.ops.window import Tail, empty_tail


class LandmarkState(NamedTuple):
    """What a sequence carries: its last tokens, and the landmarks of every complete block."""

    tail: Tail
    landmarks: Landmarks | None


class LandmarkAttention(AttentionLayer):
    """Weights exp(q.k / sqrt(d)) of near tokens, and m exp(q.k~ / sqrt(d)) of landmarks k~ = E k_block."""

    def __init__(
        self,
        form: Attention,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        seed: Seed,
        heads: HeadShard,
    ):
        super().__init__(num_heads, num_kv_heads, head_dim, True, heads)
        assert form.compression is not None
        assert form.near is not None
        self.near = form.near
        self.far_rope = form.far_rope
        self.compressor = Compressor(form.compression, None, self.kv_heads, seed, heads)
        self.rank, self.block_size = self.compressor.rank, self.compressor.block_size
        self.near_window = (self.block_size, self.near.blocks)
        self.keys_per_head, self.keys_at_position = form.keys_per_head, form.keys_at_position
        self.mixture = build_mixture(form.mixture, self.kv_heads, head_dim, seed)
        query_heads = len(self.query_heads)
        if self.near.join == "shared":
            self.far_weight = nn.Parameter(torch.zeros(query_heads))
            return
        self.gate_bias = nn.Parameter(torch.full((query_heads,), self.near.gate_bias))
        if self.near.gate == "token":
            self.gate_weight = nn.Parameter(torch.zeros(query_heads, head_dim))

    @property
    def properties(self) -> Properties:
        """What this layer can do."""
        width = len(self.kv_heads) * self.head_dim
        return Properties(
            True,
            recurrent=False,
            state_size=(self.keys_per_head + 1) * width * self.block_size * self.near.blocks,
            state_size_per_token=(self.keys_at_position + 1) * width * self.rank // self.block_size,
            exchanges=("halo", "landmarks"),
        )

    def sharded_parameters(self) -> dict[str, int]:
        """Gates and weights of query heads, and E and F where they are per head."""
        own = {name: 0 for name, _ in self.named_parameters(recurse=False)}
        own |= sharded_mixture(self.mixture)
        return own | {f"compressor.{name}": 0 for name in self.compressor.sharded}

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        positions: Positions,
        rotary: Rotary | None,
        cp_shard: ContextParallelShard,
        key_mask: Tensor | None,
        state: Any,
    ) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        size, blocks, length = self.block_size, self.near.blocks, q.shape[2]
        priors, shift = priors_and_shift(self.mixture)
        flat, rotate = pack_keys(k), rotated_each(rotary, self.head_dim)
        tail = empty_tail(flat, v, size * blocks) if state is None else state.tail
        if cp_shard.size > 1:
            tail = halo(cp_shard, flat, v, size * blocks)
        far = rotate if self.far_rope == "centroid" else None
        own = self._landmarks(flat, v, tail, positions, far)
        landmarks = (
            gathered(cp_shard, own, length) if cp_shard.size > 1 else own.after(state and state.landmarks)
        )
        out = landmark_attention(
            q,
            k,
            v,
            landmarks,
            sight(positions, length, q.device, size=size, skipped=blocks),
            near=Near(size, blocks, rotate, far),
            tail=tail,
            mass=size / self.rank,
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

    def gate(self, q: Tensor) -> Tensor | None:
        """Logits (B, H, N) or (H, 1) of the near part's share, of queries (B, H, N, d); None without a gate."""
        if self.near.join == "shared":
            return None
        bias = self.gate_bias[:, None]
        if self.near.gate == "head":
            return bias
        return (q @ self.gate_weight[..., None].to(q.dtype))[..., 0] + bias


def gathered(cp_shard: ContextParallelShard, own: Landmarks, length: int) -> Landmarks:
    """The landmarks of all shards of `length` tokens, their ends counted from this shard's first token."""
    keys, values = (cp_shard.all_tokens(x.flatten(3)).unflatten(3, x.shape[3:]) for x in own[:2])
    ends = own.ends.expand(len(keys), -1)
    missing, places = ends == MISSING, (ends + cp_shard.rank * length).double()
    told = cp_shard.all_tokens(torch.where(missing, -1.0, places)[..., None])[..., 0]
    here = torch.where(told < 0, MISSING, told.long() - cp_shard.rank * length)
    return Landmarks(keys, values, here)
