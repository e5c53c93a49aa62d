"""Nyström approximations with landmarks of whole sequences: Skyformer (kernel) and Nyströmformer (softmax)."""

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
from megakernel.papers.skyformer.nystrom_attention import depthwise_convolution, nystrom_attention
from megakernel.papers.skyformer.pseudo_inverse import exact_inverse, regularized_inverse
from megakernel.papers.skyformer.skyformer_attention import skyformer_attention

BITS = 31
"""Bits of a random number. Integers select the same rows on every device and in every dtype."""


class SkyformerAttention(AttentionLayer):
    """kappa(Q, L) kappa(L, L)^+ kappa(L, K) V; the landmarks L are redrawn at every training step.

    Landmarks are drawn from whole sequences, so packed documents see each other. Context-parallel shards use the
    Ulysses all-to-all.
    """

    per_query_head = ("draws.values",)

    def __init__(self, config: Attention, settings: LayerSettings):
        super().__init__(config, settings)
        skyformer = config.skyformer or Skyformer()
        self.per_head, self.stratified = skyformer.per_head, skyformer.draw == "stratified"
        self.invert: Callable[[Tensor], Tensor] = exact_inverse
        if skyformer.inverse == "iterative":
            self.invert = partial(regularized_inverse, gamma=skyformer.gamma)
        heads = self.query_heads if skyformer.per_head else range(1)

        def draw(number: int) -> Tensor:
            streams = (generator(settings.seed, head, number, "landmarks") for head in heads)
            size = (skyformer.features,)
            return torch.stack([torch.randint(2**BITS, size, generator=s, device="cpu") for s in streams])

        self.draws = Noise(draw, interval=1)

    def sharded_parameters(self) -> dict[str, int]:
        """Name -> dimension that counts heads: the draws, unless all heads share one."""
        return {"draws.values": 0} if self.per_head else {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        q, k = inputs.rotated(q, k)
        ulysses = Ulysses(inputs.cp_shard, q.shape[1], k.shape[1])
        q, (k, v) = ulysses.exchange_queries(q), ulysses.exchange_keys(k, v)
        length = q.shape[2]
        # Real tokens come first.
        count = torch.full((1,), length, device=q.device) if inputs.counts is None else inputs.counts
        out = skyformer_attention(
            q,
            k,
            v,
            landmarks=self._landmarks(count[:, None, None], length, ulysses.query_heads),
            invert=self.invert,
            key_mask=inputs.padding_mask,
        )
        return ulysses.restore(out), None

    def _landmarks(self, count: Tensor, length: int, heads: slice = slice(None)) -> Tensor:
        """Landmark rows (B, H or 1, F) of [Q; K]; Q and K have `length` rows, the first `count` (B, 1, 1) real."""
        draws = self.draws()[heads] if self.per_head else self.draws()
        if self.stratified:
            half = draws.shape[-1] // 2
            queries, keys = draws[..., half:], draws[..., :half]
            return torch.cat([queries * count >> BITS, length + (keys * count >> BITS)], -1)
        rows = draws * (2 * count) >> BITS
        return torch.where(rows < count, rows, length + rows - count)


class NystromformerAttention(AttentionLayer):
    """s(Q L_K^T) s(L_Q L_K^T)^+ s(L_Q K^T) V, plus an optional convolution of the values.

    Segments divide whole sequences, so packed documents see each other. Context-parallel shards use the Ulysses
    all-to-all.
    """

    per_query_head = ("convolution",)

    def __init__(self, config: Attention, settings: LayerSettings):
        super().__init__(config, settings)
        nystrom = config.nystromformer or Nystromformer()
        self.landmarks = nystrom.landmarks
        self.convolution: nn.Parameter | None = None
        if nystrom.conv_kernel is not None:
            # Starts at zero, so a new layer is plain Nyström attention.
            self.convolution = nn.Parameter(torch.zeros(len(self.query_heads), nystrom.conv_kernel))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        q, k = inputs.rotated(q, k)
        ulysses = Ulysses(inputs.cp_shard, q.shape[1], k.shape[1])
        q, (k, v) = ulysses.exchange_queries(q), ulysses.exchange_keys(k, v)
        real = inputs.padding_mask
        indices = torch.arange(q.shape[2], device=q.device)[None]
        count = q.shape[2] if real is None else real.sum(1, keepdim=True).clamp(min=1)
        # Real tokens come first and fill all segments evenly; padding gets segment numbers beyond the last.
        out = nystrom_attention(
            q, k, v, segments=indices * self.landmarks // count, count=self.landmarks, key_mask=real
        )
        if self.convolution is not None:
            values = v if real is None else v * real[:, None, :, None]
            out = out + depthwise_convolution(
                values.repeat_interleave(q.shape[1] // v.shape[1], 1), self.convolution[ulysses.query_heads]
            )
        return ulysses.restore(out), None
