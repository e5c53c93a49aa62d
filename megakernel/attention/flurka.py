"""Causal FLuRKA: landmarks of earlier blocks under a kernel, the own block exactly (docs/formulas.md, 4)."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megakernel.attention.features import build_projection
from megakernel.attention.heads import HeadShard, Seed
from megakernel.attention.layer import AttentionLayer, Properties
from megakernel.attention.local import halo
from megakernel.attention.mixture import build_mixture, priors_and_shift, sharded_mixture
from megakernel.attention.near_dropout import NearDropout
from megakernel.attention.rotary import Rotary
from megakernel.attention.sequence import ContextParallelShard
from megakernel.config.attention import Attention
from megakernel.config.compression import BlockCompression
from megakernel.ops import FlurkaState, flurka_attention
from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.documents import Positions
from megakernel.ops.mixture import first_key, pack_keys
from megakernel.ops.phi import start_state

OWN_SHARE = 0.9
"""Share of a landmark's initial weight on its own stretch of the block."""


def own_stretch(rank: int, block_size: int) -> Tensor:
    """(r, b) bool: the token belongs to the landmark's own stretch of the block, b / r tokens."""
    return torch.arange(block_size) * rank // block_size == torch.arange(rank)[:, None]


def pooling_logits(rank: int, block_size: int) -> Tensor:
    """Initial logits (r, b) of E and F, whose rows are softmaxed.

    Landmark s starts as a mean over its own stretch of b / r tokens: landmarks that started alike would stay
    alike, since they would receive equal gradients. A tenth of the weight lies on the rest of the block, so
    that every token gets a gradient. With r = b there is no rest to learn from: landmark s is token s, exact
    to rounding (a share of e^-40 on others), and the layer starts as exact attention.
    """
    own = own_stretch(rank, block_size)
    if rank == block_size:
        return torch.where(own, 0.0, -40.0)
    inside = own.sum(1, keepdim=True)
    outside = (block_size - inside).clamp(min=1)
    gap = torch.log(OWN_SHARE / inside) - torch.log((1 - OWN_SHARE) / outside)
    return torch.where(own, 0.0, -gap)


class FlurkaAttention(AttentionLayer):
    """Low-rank landmarks under a kernel for the far past, exact attention for the near.

    far_mass (beta) scales the landmarks of a key head where near and far share phi; far_weight (gamma) scales
    them for a query head beside a softmax under one normalizer. A gated layer normalizes both parts on their
    own, and neither would have an effect. Beside a softmax a landmark counts m phi(q).phi(k) / phi(0).phi(0): the near
    part weighs a query and a key that have nothing in common 1, and phi alone may weigh them anything (hedgehog 2 / d,
    elu d), which would have gamma find the scale before it can learn.

    Mixture keys: E pools each projected key of a token, and what has the keys k_r weighs sum_r pi_r s(q, k_r), with
    s = phi(q).phi(k) far and the near part's own s near. Priors belong to keys, whatever s compares them: a window as
    long as the row is then the softmax mixture of docs/formulas.md, 6, a window under phi with r = b is MLK, and
    near and far count a token in one unit, sum_r pi_r, so that m still is how many tokens a landmark stands for.
    """

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
        assert isinstance(form.compression, BlockCompression)
        assert form.near is not None
        assert form.feature_map is not None
        self.near, self.far_rope, self.block_size = form.near, form.far_rope, form.compression.block_size
        self.near_window = (self.block_size, self.near.blocks)
        self.projection = build_projection(form.feature_map, self.kv_heads, head_dim, seed, heads)
        self.keys_per_head = form.keys_per_head
        self.mixture = build_mixture(form.mixture, self.kv_heads, head_dim, seed)

        query_heads, kv_heads = len(self.query_heads), len(self.kv_heads)
        logits = pooling_logits(form.compression.rank, self.block_size)
        self.per_head = form.compression.per_head
        if self.per_head:
            logits = logits.repeat(kv_heads, 1, 1)
        self.pool_keys = nn.Parameter(logits.clone())
        self.pool_values = None if form.compression.share_kv else nn.Parameter(logits.clone())
        if self.near.kind == "kernel":
            self.far_mass = nn.Parameter(torch.zeros(kv_heads))
        elif self.near.join == "shared":
            self.far_weight = nn.Parameter(torch.zeros(query_heads))
            at_zero = form.feature_map.similarity_at_zero(head_dim)
            self.matched_scale = -math.log(at_zero) if at_zero else 0.0
        else:
            self.gate_bias = nn.Parameter(torch.full((query_heads,), self.near.gate_bias))
            if self.near.gate == "token":
                self.gate_weight = nn.Parameter(torch.zeros(query_heads, head_dim))
        self.near_dropout: NearDropout | None = None

    @property
    def properties(self) -> Properties:
        """What this layer can do."""
        tail = (self.keys_per_head + 1) * self.head_dim * self.block_size * self.near.blocks
        state = len(self.kv_heads) * (self.projection.features * (self.head_dim + 1) + tail)
        return Properties(True, True, state_size=state, state_size_per_token=0, exchanges=("halo", "state"))

    def sharded_parameters(self) -> dict[str, int]:
        """All but E and F, which heads share unless they are per head."""
        shared = () if self.per_head else ("pool_keys", "pool_values")
        own = {name: 0 for name, _ in self.named_parameters(recurse=False) if name not in shared}
        own |= sharded_mixture(self.mixture)
        return own | {f"projection.{name}": at for name, at in self.projection.sharded_parameters().items()}

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
        projection = self.projection()
        priors, shift = priors_and_shift(self.mixture)
        if cp_shard.size > 1:
            far = start_state(
                self.projection.feature_map, first_key(k, priors, shift), projection, v.shape[-1]
            )
            state = FlurkaState(far, halo(cp_shard, pack_keys(k), v, self.block_size * self.near.blocks))
        return flurka_attention(
            q,
            k,
            v,
            feature_map=self.projection.feature_map,
            projection=projection,
            pool_keys=self._pool(self.pool_keys),
            pool_values=self._pool(self.pool_keys if self.pool_values is None else self.pool_values),
            near=self.near.kind,
            blocks=self.near.blocks,
            priors=priors,
            shift=shift,
            gate=self.gate(q),
            far_mass=getattr(self, "far_mass", None),
            far_weight=self._far_scale(),
            rotary=rotary,
            far_rope=self.far_rope,
            positions=positions,
            initial_state=state,
            exchange=cp_shard.start_prefix if cp_shard.size > 1 else None,
        )

    def _pool(self, logits: Tensor) -> Tensor:
        logits = logits if self.per_head else self.heads.shared(logits)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)

    def _far_scale(self) -> Tensor | None:
        """Logarithm (H,) of what the far part counts under one normalizer; None where it has its own."""
        if self.near.kind == "kernel" or self.is_gated:
            return None
        return self.far_weight.to(accum_dtype(self.far_weight.dtype)) + self.matched_scale

    def gate(self, q: Tensor) -> Tensor | None:
        """Logits (B, H, N) or (H, 1) of the near part's share, of queries (B, H, N, d); None without a gate."""
        if not self.is_gated:
            return None
        gate = self.gate_bias[:, None]
        if self.near.gate == "token":
            gate = (q @ self.gate_weight[..., None].to(q.dtype))[..., 0] + gate
        return gate if self.near_dropout is None else self.near_dropout(gate)

    @property
    def is_gated(self) -> bool:
        """Whether a gate joins the near and the far part."""
        return self.near.kind == "softmax" and self.near.join == "gated"

    def drop_near(self, probability: Callable[[int], float], seed: Seed) -> None:
        """Shut the near window of heads from now on, with this probability of a step: see `NearDropout`.

        Raises ValueError where no gate joins the near and the far part.
        """
        if not self.is_gated:
            raise ValueError(
                f"near.join={self.near.join} of near.kind={self.near.kind} has no gate to shut; use gated"
            )
        self.near_dropout = NearDropout(
            probability, self.query_heads, self.heads, seed, self.gate_bias.device
        )
