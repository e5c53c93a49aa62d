"""Nyström's approximation through landmarks of whole sequences: Skyformer of a kernel, Nyströmformer of softmax."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megakernel.attention.heads import LayerSettings, generator
from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.layer import AttentionLayer
from megakernel.attention.noise import Noise
from megakernel.attention.sequence import Ulysses
from megakernel.config.algebra import Nystromformer, Skyformer
from megakernel.config.attention import Attention
from megakernel.ops.nystrom_attention import depthwise_convolution, nystrom_attention
from megakernel.ops.pseudo_inverse import exact_inverse, regularized_inverse
from megakernel.ops.skyformer_attention import skyformer_attention

BITS = 31
"""Of a drawn number: whole numbers below 2^31 choose among rows alike on every device and in every dtype."""


class SkyformerAttention(AttentionLayer):
    """kappa(Q, L) kappa(L, L)^+ kappa(L, K) V; the landmarks L are drawn again at every training step.

    They are landmarks of whole sequences: documents in one sequence see each other. Shards of a sequence trade tokens
    for heads.
    """

    def __init__(self, form: Attention, settings: LayerSettings):
        super().__init__(form, settings)
        sky = form.skyformer or Skyformer()
        self.per_head, self.stratified = sky.per_head, sky.draw == "stratified"
        self.invert: Callable[[Tensor], Tensor] = exact_inverse
        if sky.inverse == "iterative":
            self.invert = partial(regularized_inverse, gamma=sky.gamma)
        owners = self.query_heads if sky.per_head else range(1)

        def draw(number: int) -> Tensor:
            streams = [generator(settings.seed, head, number, "landmarks") for head in owners]
            rows = [torch.randint(2**BITS, (sky.features,), generator=one, device="cpu") for one in streams]
            return torch.stack(rows)

        self.draws = Noise(draw, interval=1)

    def sharded_parameters(self) -> dict[str, int]:
        """The draws, unless all heads share one."""
        return {"draws.values": 0} if self.per_head else {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        q, k = inputs.rotated(q, k)
        ulysses = Ulysses(inputs.cp_shard, q.shape[1], k.shape[1])
        q, (k, v) = ulysses.of_queries(q), ulysses.of_keys(k, v)
        length = q.shape[2]
        # Real tokens lie first.
        count = torch.full((1,), length, device=q.device) if inputs.counts is None else inputs.counts
        out = skyformer_attention(
            q,
            k,
            v,
            landmarks=self._landmarks(count[:, None, None], length, ulysses.query_heads),
            invert=self.invert,
            key_mask=inputs.padding_mask,
        )
        return ulysses.cut(out), None

    def _landmarks(self, count: Tensor, length: int, heads: slice = slice(None)) -> Tensor:
        """Rows (B, H or 1, F) of [Q; K], each of `length` rows of which the first `count` (B, 1, 1) are real."""
        draws = self.draws()[heads] if self.per_head else self.draws()
        if self.stratified:
            half = draws.shape[-1] // 2
            queries, keys = draws[..., half:], draws[..., :half]
            return torch.cat([queries * count >> BITS, length + (keys * count >> BITS)], -1)
        rows = draws * (2 * count) >> BITS
        return torch.where(rows < count, rows, length + rows - count)


class NystromformerAttention(AttentionLayer):
    """s(Q L_K^T) s(L_Q L_K^T)^+ s(L_Q K^T) V, and a convolution of the values if asked for.

    Segments divide whole sequences: documents in one sequence see each other. Shards of a sequence trade tokens for
    heads.
    """

    def __init__(self, form: Attention, settings: LayerSettings):
        super().__init__(form, settings)
        nystrom = form.nystromformer or Nystromformer()
        self.landmarks = nystrom.landmarks
        self.convolution: nn.Parameter | None = None
        if nystrom.conv_kernel is not None:
            # From nothing: a new layer is Nyström attention alone.
            self.convolution = nn.Parameter(torch.zeros(len(self.query_heads), nystrom.conv_kernel))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        q, k = inputs.rotated(q, k)
        ulysses = Ulysses(inputs.cp_shard, q.shape[1], k.shape[1])
        q, (k, v) = ulysses.of_queries(q), ulysses.of_keys(k, v)
        real = inputs.padding_mask
        places = torch.arange(q.shape[2], device=q.device)[None]
        count = q.shape[2] if real is None else real.sum(1, keepdim=True).clamp(min=1)
        # Real tokens lie first and fill all segments evenly; what lies behind them belongs to none.
        out = nystrom_attention(
            q, k, v, segments=places * self.landmarks // count, count=self.landmarks, key_mask=real
        )
        if self.convolution is not None:
            values = v if real is None else v * real[:, None, :, None]
            out = out + depthwise_convolution(
                values.repeat_interleave(q.shape[1] // v.shape[1], 1), self.convolution[ulysses.query_heads]
            )
        return ulysses.cut(out), None
