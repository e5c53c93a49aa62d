"""EVA, exact windows and control variates of chunks (docs/formulas.md, 7), and FLuRKA-EVA over compressed keys."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megakernel.attention.compression import CompressedKV
from megakernel.attention.heads import LayerSettings, generator
from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.landmark import LandmarkState, gather_landmarks
from megakernel.attention.layer import AttentionLayer, FullPrecision
from megakernel.attention.low_rank import LowRankAttention
from megakernel.attention.sequence import ContextParallelShard, Ulysses
from megakernel.config.algebra import Eva
from megakernel.config.attention import Attention
from megakernel.ops.documents import Positions
from megakernel.ops.landmark_attention import (
    Landmarks,
    complete_blocks,
    landmark_attention,
    landmark_visibility,
)
from megakernel.ops.tensors import accum_dtype
from megakernel.ops.window import LocalWindow, Tail, empty_tail
from megakernel.papers.flurka.eva_attention import ChunkSummaries, Windows, control_variates, eva_attention

NOISE_GROUP = 64
"""Chunks per generator and draw of noise; fixed, because the numbers depend on how many are drawn at once."""


class MeanNet(FullPrecision):
    """LayerNorm(W x + b) of chunk means; all heads of a layer share it."""

    def __init__(self, settings: LayerSettings, name: str):
        super().__init__()
        self.heads, head_dim = settings.heads, settings.head_dim
        stream = generator(settings.seed, "eva", name)
        weight = torch.randn(head_dim, head_dim, generator=stream, device="cpu") * head_dim**-0.5
        self.weight = nn.Parameter(weight.to(torch.get_default_device()))
        self.bias = nn.Parameter(torch.zeros(head_dim))
        self.norm_weight = nn.Parameter(torch.ones(head_dim))
        self.norm_bias = nn.Parameter(torch.zeros(head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d)."""
        weight, bias, scale, shift = (
            self.heads.shared(p).to(x.dtype)
            for p in (self.weight, self.bias, self.norm_weight, self.norm_bias)
        )
        return F.layer_norm(F.linear(x, weight, bias), x.shape[-1:], scale, shift)


class ChunkSummarizer(nn.Module):
    """Computes (k_c, beta_c) of each chunk from omega_c = share (q_c + k_c), plus a standard normal in training.

    The noise is a function of (seed, head, training step, index of the chunk in its document): the same in all
    sequences, ranks and recomputations, however documents are packed, padded or sharded.
    """

    def __init__(self, settings: LayerSettings, share: float, count_padding: bool = False):
        super().__init__()
        self.share, self.count_padding = share, count_padding
        self.query_heads, self.seed, self.step = settings.query_heads, settings.seed, 0
        self.queries = MeanNet(settings, "queries")
        self.keys = MeanNet(settings, "keys")

    def redraw(self, step: int) -> None:
        """Use the noise of a training step."""
        self.step = step

    def noise(self, indices: Tensor, width: int, heads: slice = slice(None)) -> Tensor:
        """Noise (B or 1, H, S, d) of `heads` for the chunks with these indices (B or 1, S) in their documents."""
        groups = range(int(indices.max()) // NOISE_GROUP + 1)
        drawn = [
            torch.cat(
                [
                    torch.randn(
                        NOISE_GROUP,
                        width,
                        generator=generator(self.seed, head, self.step, group),
                        device="cpu",
                    )
                    for group in groups
                ]
            )
            for head in self.query_heads[heads]
        ]
        return torch.stack(drawn)[:, indices.cpu()].transpose(0, 1)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        real_q: Tensor,
        real_k: Tensor,
        indices: Tensor,
        heads: slice = slice(None),
    ) -> tuple[Tensor, Tensor]:
        """Keys k_c (B, H, S, d) and values beta_c (B, H, S, D) of S chunks.

        q: (B, H, S, s_q, d); k, v: (B, H, S, s, .); real_q, real_k: (B or 1, S, s) bool; indices: (B or 1, S), of each
        chunk in its document; heads: the query heads given.
        """
        # Means over tokens: bfloat16 would keep 8 bits of them.
        q, k, v = (x.to(accum_dtype(x.dtype)) for x in (q, k, v))
        q_c = self.queries(self._mean(q, real_q))
        k_c = self.keys(self._mean(k, real_k))
        omega = self.share * (q_c + k_c)
        if self.training:
            omega = omega + self.noise(indices, omega.shape[3], heads).to(omega)
        return k_c, control_variates(omega, k, v, real_k)

    def _mean(self, x: Tensor, real: Tensor) -> Tensor:
        """Mean over real tokens, (B, H, S, s, d) -> (B, H, S, d); 0 if there are none."""
        weights = real[:, None, ..., None].to(x.dtype)
        counts = x.shape[3] if self.count_padding else weights.sum(3).clamp(min=1)
        return (x * weights).sum(3) / counts


def _repeat_kv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v repeated for each query head, because a chunk's summary depends on the head's queries."""
    group = q.shape[1] // k.shape[1]
    return k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def _chunk(x: Tensor, size: int) -> Tensor:
    """(B, H, N, d) -> (B, H, ceil(N / size), size, d), padded with zeros."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))


def _chunk_indices(real: Tensor) -> Tensor:
    """(1, S): indices of the chunks."""
    return torch.arange(real.shape[1], device=real.device)[None]


def _real_mask(length: int, size: int, counts: Tensor | None, device: torch.device) -> Tensor:
    """(B or 1, ceil(length / size), size) bool: whether the token index is below `counts`, or `length` if None."""
    ends = torch.full((1,), length, device=device) if counts is None else counts
    indices = torch.arange(-(-length // size) * size, device=device)
    return (indices < ends[:, None]).unflatten(1, (-1, size))


class EvaAttention(AttentionLayer):
    """Bidirectional EVA. A sequence is one document; context-parallel shards use the Ulysses all-to-all."""

    def __init__(self, config: Attention, settings: LayerSettings):
        super().__init__(config, settings)
        self.eva = config.eva or Eva()
        self.summaries = ChunkSummarizer(settings, 0.5, count_padding=self.eva.published_padding)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        q, k = inputs.rotated(q, k)
        ulysses = Ulysses(inputs.cp_shard, q.shape[1], k.shape[1])
        q, (k, v) = ulysses.exchange_queries(q), ulysses.exchange_keys(k, v)
        k, v = _repeat_kv(q, k, v)
        size, window, length = self.eva.chunk_size, self.eva.window_size, q.shape[2]
        counts = inputs.counts
        real = _real_mask(length, size, counts, q.device)
        keys, values = self.summaries(
            *(_chunk(x, size) for x in (q, k, v)), real, real, _chunk_indices(real), ulysses.query_heads
        )
        exists = torch.ones_like(real) if self.eva.published_padding else real
        visible = exists.any(-1)[:, None].expand(-1, -(-length // window), -1)
        reach = window if self.eva.overlap else 0
        if self.eva.exclude_window:
            visible = visible & ~self._chunks_in_window(length, reach, q.device)
        real_keys = _real_mask(length, window, counts, q.device)[:, None, ..., None]
        windows = Windows(
            _extend_windows(_chunk(k, window), reach),
            _extend_windows(_chunk(v, window), reach),
            _extend_windows(real_keys, reach)[:, 0, ..., 0],
            window,
        )
        return ulysses.restore(eva_attention(q, windows, ChunkSummaries(keys, values, visible))), None

    def _chunks_in_window(self, length: int, reach: int, device: torch.device) -> Tensor:
        """(M, C) bool: whether the chunk lies inside the window and its overlap of `reach` tokens."""
        window, size = self.eva.window_size, self.eva.chunk_size
        starts = torch.arange(0, length, window, device=device)[:, None]
        chunks = torch.arange(0, length, size, device=device)
        last = torch.clamp(chunks + size, max=length)
        return (chunks >= starts - reach) & (last <= torch.clamp(starts + window + reach, max=length))


def _extend_windows(x: Tensor, reach: int) -> Tensor:
    """Windows (B, H, M, w, d) extended by `reach` tokens on both sides, zeros or False outside the sequence."""
    if reach == 0:
        return x
    window = x.shape[3]
    flat = F.pad(x.flatten(2, 3), (0, 0, reach, reach))
    return flat.unfold(2, window + 2 * reach, window).transpose(-1, -2)


class CausalEvaAttention(AttentionLayer):
    """Causal EVA: a token sees its window up to itself, and the chunks that end before its own chunk begins."""

    def __init__(self, config: Attention, settings: LayerSettings):
        super().__init__(config, settings)
        self.eva = eva = config.eva or Eva()
        self.blocks = 2 if eva.overlap else 1
        self.near_window = (eva.window_size, self.blocks)
        self.halo = max(eva.window_size * self.blocks, eva.chunk_size)
        self.summaries = ChunkSummarizer(settings, 1.0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        q, k = inputs.rotated(q, k)
        k, v = _repeat_kv(q, k, v)
        length, width = q.shape[2], q.shape[3]
        # A chunk's summary needs its queries too, so they are packed with the keys.
        packed = torch.cat([k, q], -1)
        tail, before = inputs.state or (empty_tail(packed, v, self.halo), None)
        if inputs.cp_shard.size > 1:
            tail = inputs.halo(packed, v, self.halo)
        positions = inputs.resolved_positions
        own = self._landmarks(packed, v, tail, positions)
        landmarks = gather_landmarks(inputs.cp_shard, own, length, before)
        visibility = partial(landmark_visibility, positions, length, q.device)
        visible = visibility(size=self.eva.chunk_size, skipped=1)
        if self.eva.exclude_window:
            outside = visibility(size=self.eva.window_size, skipped=self.blocks)
            visible = visible._replace(limit=torch.minimum(visible.limit, outside.limit))
        out = landmark_attention(
            q,
            k,
            v,
            landmarks,
            visible,
            window=LocalWindow(self.eva.window_size, self.blocks, None),
            tail=Tail(tail.keys[..., :width], tail.values),
            positions=positions,
        )
        if not inputs.return_state:
            return out, None
        carried = landmarks.carried(own.ends.shape[1], positions, length, self.eva.chunk_size)
        return out, LandmarkState(tail.after(packed, v), carried)

    def _landmarks(self, packed: Tensor, v: Tensor, tail: Tail, positions: Positions) -> Landmarks:
        """Summaries of the chunks that end among these tokens."""
        size = self.eva.chunk_size
        chunks = complete_blocks(positions, packed.shape[2], packed.device, size)
        k, q = chunks.gather(tail.keys, packed).chunk(2, -1)
        v = chunks.gather(tail.values, v)
        real = torch.ones(1, k.shape[2], size, dtype=torch.bool, device=k.device)
        indices = (chunks.last_positions() // size).clamp(min=0)
        keys, values = self.summaries(q, k, v, real, real, indices)
        return Landmarks(keys[:, :, :, None], values[:, :, :, None], chunks.ends)


class FlurkaEvaAttention(LowRankAttention):
    """FLuRKA-EVA: the d_k compressed keys are divided equally among the windows of queries, as EVA's chunks.

    A window attends the keys of its own chunk exactly, and the summaries of all chunks.
    """

    def __init__(self, config: Attention, settings: LayerSettings):
        super().__init__(config, settings)
        self.eva = config.eva or Eva()
        self.summaries = ChunkSummarizer(settings, 0.5)

    def _attend(
        self,
        q: Tensor,
        landmarks: CompressedKV,
        priors: Tensor | None,
        counts: Tensor | None,
        cp_shard: ContextParallelShard,
    ) -> Tensor:
        ulysses = Ulysses(cp_shard, q.shape[1], landmarks.keys.shape[1])
        q = ulysses.exchange_queries(q)
        # Every shard holds the landmarks of all heads.
        k, v = _repeat_kv(q, *(ulysses.select_key_heads(x, 1) for x in (landmarks.keys, landmarks.values)))
        window, length = self.eva.window_size, q.shape[2]
        real_q = _real_mask(length, window, counts, q.device)
        index, real_k = keys_of_windows(real_q.any(-1), k.shape[2])
        k, v = (_gather_keys(x, index) for x in (k, v))
        keys, values = self.summaries(
            _chunk(q, window), k, v, real_q, real_k, _chunk_indices(real_q), ulysses.query_heads
        )
        visible = real_k.any(-1)[:, None].expand(-1, real_q.shape[1], -1)
        if self.eva.exclude_window:
            visible = visible & ~torch.eye(visible.shape[2], dtype=torch.bool, device=q.device)
        chunks = ChunkSummaries(keys, values, visible)
        return ulysses.restore(eva_attention(q, Windows(k, v, real_k, window), chunks))


def keys_of_windows(windows: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """The keys of each window: their indices (B or 1, M, g), and (B or 1, M, g) bool, whether the key exists.

    windows: (B or 1, M) bool, whether the window has a query; those with queries come first.
    """
    size = -(-keys // windows.sum(1).clamp(min=1))
    within = torch.arange(int(size.max()), device=windows.device)
    window = torch.arange(windows.shape[1], device=windows.device)
    index = window[:, None] * size[:, None, None] + within
    real = (within < size[:, None, None]) & (index < keys) & windows[..., None]
    return index.clamp(max=keys - 1), real


def _gather_keys(x: Tensor, index: Tensor) -> Tensor:
    """(B, H, L, d) at (B or 1, M, g) -> (B, H, M, g, d)."""
    if len(index) == 1:
        return x[:, :, index[0]]
    flat = index.flatten(1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return x.gather(2, flat).unflatten(2, index.shape[1:])
