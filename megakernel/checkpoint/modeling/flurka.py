"""Causal FLuRKA: exact attention to the current block, kernel attention to low-rank landmarks of earlier blocks."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .blocks import Tail, window_positions, window_visible
from .configuration import MegakernelConfig
from .features import FeatureMap, Features
from .kernel_sums import KernelState, Sums, with_ones
from .layers import Attention, Documents, Rotary, precise

FLURKA_CHUNK = 256  # tokens whose windows and landmarks are computed at once


class FlurkaState(NamedTuple):
    """What later tokens need of earlier ones, of constant size."""

    far: KernelState  # sums over the landmarks of the document's earlier blocks
    tail: Tail  # the last tokens: those in the window, and of blocks that are not complete


class FlurkaAttention(Attention, kind="flurka"):
    """Token i in block J = i // b of its document attends to the window of `blocks` blocks up to itself, and by
    phi(q).phi(E k) to the r landmarks E k, F v of every block before the window, each with the weight of b / r tokens.

    A gate merges the two parts, each with its own normalizer (join: gated), or they share one (shared, kernel).
    """

    def __init__(self, config: MegakernelConfig, options: dict[str, Any], rotary: Rotary | None):
        super().__init__(config, options, rotary)
        pool, self.near, phi = options["compression"], options["near"], options["feature_map"]
        self.block_size, self.rank, self.blocks = pool["block_size"], pool["rank"], self.near["blocks"]
        self.reach = self.block_size * self.blocks
        self.far_rotary = rotary if options["far_rope"] == "centroid" else None
        self.projection = FeatureMap.classes[phi["name"]](config, phi)
        shape = (self.kv_heads,) * pool["per_head"] + (self.rank, self.block_size)
        self.pool_keys = nn.Parameter(torch.empty(shape))
        self.pool_values = None if pool["share_kv"] else nn.Parameter(torch.empty(shape))
        self.join = self.near["join"] if self.near["kind"] == "softmax" else "kernel"
        if self.join == "kernel":
            self.far_mass = nn.Parameter(torch.empty(self.kv_heads))
        elif self.join == "shared":
            self.far_weight = nn.Parameter(torch.empty(self.num_heads))
            # The similarity of unrelated keys, phi(0).phi(0), is 1 under softmax.
            of_zeros = {"relu": 0, "identity": 0, "elu": self.head_dim, "hedgehog": 2 / self.head_dim}
            of_zeros |= {"favor": 1, "rff": 1}
            unrelated = of_zeros[phi["name"]] + phi["smoothing"] ** 2
            self.far_scale = -math.log(unrelated) if unrelated else 0.0
        else:
            self.gate_bias = nn.Parameter(torch.empty(self.num_heads))
            if self.near["gate"] == "token":
                self.gate_weight = nn.Parameter(torch.empty(self.num_heads, self.head_dim))

    def reset_parameters(self) -> None:
        """A landmark starts as 0.9 the mean of its own segment of the block, and 0.1 that of the others."""
        super().reset_parameters()
        own = torch.arange(self.block_size) * self.rank // self.block_size == torch.arange(self.rank)[:, None]
        gap = 40.0 if self.rank == self.block_size else math.log(max(9 * (self.rank - 1), 1))
        for pool in (self.pool_keys, self.pool_values):
            if pool is not None:
                init.copy_(pool, torch.where(own, 0.0, -gap))
        if self.join == "gated":
            init.constant_(self.gate_bias, self.near["gate_bias"])

    def forward(self, q, k, v, positions, state=None, decay=None, strength=None):
        """See Attention."""
        ends = positions % self.block_size == self.block_size - 1
        log_decay = self.log_decay(k, decay).masked_fill(~ends[:, None], 0.0)
        far: Any = None if state is None else state.far
        tail = Tail.empty(k, v, self.reach) if state is None else state.tail
        outputs, size = [], FLURKA_CHUNK
        for *chunk, at in zip(*(x.split(size, 2) for x in (q, k, v, log_decay)), positions.split(size, 1)):
            queries, keys = chunk[0], torch.cat([tail.keys.to(k.dtype), chunk[1]], 2)
            values = torch.cat([tail.values.to(v.dtype), chunk[2]], 2)
            near = self.near_sums(queries, keys, values, at)
            landmarks, far = self.far_sums(queries, keys, values, at, chunk[3], far)
            outputs.append(self.merged(near, landmarks, queries, at).flatten(1, 2).to(v.dtype))
            tail = Tail(keys[:, :, -self.reach :], values[:, :, -self.reach :])
        return torch.cat(outputs, 2), FlurkaState(far, tail)

    def log_decay(self, k: Tensor, logits: Tensor | None) -> Tensor:
        """(B, H_kv, N): log factor of earlier landmarks at a token that ends a block."""
        return precise(k).new_zeros(k.shape[:3])

    def near_sums(self, q: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Sums:
        """Sums over the window of each token; keys and values begin with the tail."""
        visible = window_visible(at, self.reach, self.block_size, self.blocks)
        rotary = self.rotary if self.join != "kernel" else self.far_rotary
        if rotary is not None:
            q, keys = rotary(q, at), rotary(keys, window_positions(at, self.reach))
        queries = self.by_key_head(q)
        if self.join == "kernel":
            return Sums.of_pairs(self.projection(queries), self.projection(keys), with_ones(values), visible)
        scores = precise(queries) @ precise(keys).mT[:, :, None] * self.head_dim**-0.5
        scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
        log = scores.amax(-1).detach()
        return Sums((scores - log[..., None]).exp() @ with_ones(values)[:, :, None], log)

    def far_sums(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        at: Tensor,
        log_decay: Tensor,
        state: KernelState | None,
    ) -> tuple[Sums, KernelState]:
        """Sums over the landmarks that each token sees, and their state after the last token."""
        places = torch.arange(at.shape[1], device=at.device)
        # Where a block ends, the first block of its window leaves the window of all later tokens.
        ends = (at % self.block_size == self.block_size - 1) & (at >= self.reach - 1)
        slots = -(-at.shape[1] // self.block_size)  # at most so many ends
        end = ends.int().argsort(dim=1, descending=True, stable=True)[:, :slots]
        landmarks, pooled = self.landmarks(keys, values, end, at)
        visible = (places - at)[..., None] <= end[:, None]  # of the token's document
        visible = (visible & ends.gather(1, end)[:, None]).repeat_interleave(self.rank, 2)
        end = end.repeat_interleave(self.rank, 1)

        phi_k = self.projection(landmarks)
        phi_q = self.projection(self.by_key_head(q if self.far_rotary is None else self.far_rotary(q, at)))
        # The state and landmarks that entered before decay at each end; logs are relative to the chunk's start.
        decayed = log_decay.cumsum(-1)
        phi_k = Features(
            phi_k.values, phi_k.log - decayed.gather(2, end[:, None].expand(-1, self.kv_heads, -1))
        )
        phi_q = Features(phi_q.values, phi_q.log + (decayed - log_decay)[:, :, None])
        documents, state = Documents.of(at), state or KernelState.empty(phi_k, pooled)
        sums = Sums.of_pairs(phi_q, phi_k, pooled, visible & (end[:, None] < places[:, None]))
        sums = sums.plus(Sums.of_state(phi_q, state, documents.reads))
        state, total = state.next(phi_k, pooled, visible[:, -1], documents.keeps), decayed[..., -1]
        factor = (total - total.detach()).exp()[..., None, None]  # 1, with the decay's gradient
        return sums, KernelState(state.sums * factor, state.log + total.detach())

    def landmarks(self, keys: Tensor, values: Tensor, end: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """E k (B, H_kv, S r, d) and (b / r) [F v, 1] of the blocks that leave the window at places `end` (B, S)."""
        block = (end[..., None] + 1 + torch.arange(self.block_size, device=end.device)).flatten(1)
        pooled = []
        for pool, x in ((self.pool_keys, keys), (self.pool_values, values)):
            index = block[:, None, :, None].expand(-1, self.kv_heads, -1, x.shape[-1])
            tokens = precise(x).gather(2, index).unflatten(2, (-1, self.block_size))
            weights = precise(self.pool_keys if pool is None else pool).softmax(-1).to(tokens.dtype)
            weights = weights[:, None] if weights.dim() == 3 else weights
            pooled.append((weights @ tokens).flatten(2, 3))
        landmarks, count = pooled[0], self.block_size / self.rank
        if self.far_rotary is not None:  # to the center of the block
            center = at.gather(1, end) - (self.blocks - 1) * self.block_size - (self.block_size - 1) / 2
            landmarks = self.far_rotary(landmarks, center.repeat_interleave(self.rank, 1))
        if self.join == "kernel":
            count = count * precise(self.far_mass).exp()[:, None, None]
        return landmarks, with_ones(pooled[1]) * count

    def merged(self, near: Sums, far: Sums, q: Tensor, at: Tensor) -> Tensor:
        """The output (B, H_kv, G, L, d)."""
        if self.join == "shared":
            weight = (precise(self.far_weight) + self.far_scale).exp().view(self.kv_heads, -1, 1, 1)
            far = Sums(far.values * weight, far.log)
        if self.join != "gated":
            return near.plus(far).mean()
        gate, q = precise(self.gate_bias)[:, None], precise(q)
        if self.near["gate"] == "token":
            gate = gate + torch.einsum("bhld,hd->bhl", q, self.gate_weight.to(q.dtype))
        share = self.by_key_head(gate.sigmoid().expand(q.shape[:3]))[..., None]
        sees_far = (at >= self.reach)[:, None, None, :, None]
        share = share.where(sees_far, 1.0)
        return share * near.mean() + (1 - share) * far.mean()
