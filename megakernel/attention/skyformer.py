"""Skyformer: kernelized attention through landmarks drawn from queries and keys."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megakernel.attention.heads import HeadShard, Seed, generator
from megakernel.attention.layer import AttentionLayer, Properties, rotate
from megakernel.attention.noise import Noise
from megakernel.attention.rotary import Rotary
from megakernel.attention.sequence import ContextParallelShard
from megakernel.attention.ulysses import Ulysses
from megakernel.config.landmark import Skyformer
from megakernel.ops.documents import Positions
from megakernel.ops.pseudo_inverse import exact_inverse, regularized_inverse
from megakernel.ops.skyformer_attention import skyformer_attention

BITS = 31
"""Of a drawn number: whole numbers below 2^31 choose among rows alike on every device and in every dtype."""


class SkyformerAttention(AttentionLayer):
    """kappa(Q, L) kappa(L, L)^+ kappa(L, K) V; the landmarks L are drawn again at every training step.

    They are landmarks of whole rows: documents in one row see each other. Shards of a row trade tokens for heads.
    """

    def __init__(
        self,
        form: Skyformer,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        seed: Seed,
        heads: HeadShard,
    ):
        super().__init__(num_heads, num_kv_heads, head_dim, False, heads)
        self.per_head, self.stratified = form.per_head, form.draw == "stratified"
        self.invert: Callable[[Tensor], Tensor] = exact_inverse
        if form.inverse == "iterative":
            self.invert = partial(regularized_inverse, gamma=form.gamma)
        owners = self.query_heads if form.per_head else range(1)

        def draw(number: int) -> Tensor:
            streams = [generator(seed, head, number, "landmarks") for head in owners]
            return torch.stack(
                [
                    torch.randint(2**BITS, (form.features,), generator=stream, device="cpu")
                    for stream in streams
                ]
            )

        self.draws = Noise(draw, interval=1)

    @property
    def properties(self) -> Properties:
        """What this layer can do."""
        return Properties(False, recurrent=False, state_size=0, state_size_per_token=0, exchanges=("heads",))

    def sharded_parameters(self) -> dict[str, int]:
        """The draws, unless all heads share one."""
        return {"draws.values": 0} if self.per_head else {}

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
        q, k = rotate(rotary, q, k, positions)
        rows = Ulysses(cp_shard, q.shape[1], k.shape[1])
        q, (k, v) = rows.of_queries(q), rows.of_keys(k, v)
        length = q.shape[2]
        # Real tokens lie first.
        count = torch.full((1,), length, device=q.device) if key_mask is None else key_mask.sum(1)
        out = skyformer_attention(
            q,
            k,
            v,
            landmarks=self._landmarks(count[:, None, None], length, rows.query_heads),
            invert=self.invert,
            key_mask=key_mask,
        )
        return rows.cut(out), None

    def _landmarks(self, count: Tensor, length: int, heads: slice = slice(None)) -> Tensor:
        """Rows (B, H or 1, F) of [Q; K], each of `length` rows of which the first `count` (B, 1, 1) are real."""
        draws = self.draws()[heads] if self.per_head else self.draws()
        if self.stratified:
            half = draws.shape[-1] // 2
            queries, keys = draws[..., half:], draws[..., :half]
            return torch.cat([queries * count >> BITS, length + (keys * count >> BITS)], -1)
        rows = draws * (2 * count) >> BITS
        return torch.where(rows < count, rows, length + rows - count)
