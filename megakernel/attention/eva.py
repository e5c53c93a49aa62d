"""EVA: exact windows and control variates of chunks (docs/formulas.md, 7), and FLuRKA-EVA over compressed keys."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megakernel.attention.compression import Landmarks as Compressed
from megakernel.attention.heads import LayerSettings, generator
from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.landmark import LandmarkState, gathered
from megakernel.attention.layer import AttentionLayer, FullPrecision
from megakernel.attention.low_rank import LowRankAttention
from megakernel.attention.sequence import ContextParallelShard, Ulysses
from megakernel.config.algebra import Eva
from megakernel.config.attention import Attention
from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.documents import Positions
from megakernel.ops.eva_attention import Chunks, Windows, control_variates, eva_attention
from megakernel.ops.landmark_attention import Landmarks, complete_blocks, landmark_attention, sight
from megakernel.ops.window import LocalWindow, Tail, empty_tail

NOISE_GROUP = 64
"""Chunks whose noise comes from one generator: a stretch of random numbers depends on how long a stretch is drawn."""


class MeanNet(FullPrecision):
    """LayerNorm(W x + b) of a chunk's mean, shared by the heads of a layer."""

    def __init__(self, settings: LayerSettings, name: str):
        super().__init__()
        self.heads, head_dim = settings.heads, settings.head_dim
        draw = generator(settings.seed, "eva", name)
        weight = torch.randn(head_dim, head_dim, generator=draw, device="cpu") * head_dim**-0.5
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


class Summaries(nn.Module):
    """(k_c, beta_c) of each chunk: omega_c = share (q_c + k_c), with a standard normal added in training.

    The noise is a function of (seed, head, training step, place of the chunk in its document): the same
    for all sequences, ranks and recomputations, however documents are packed, padded or cut.
    """

    def __init__(self, settings: LayerSettings, share: float, count_padding: bool = False):
        super().__init__()
        self.share, self.count_padding = share, count_padding
        self.query_heads, self.seed, self.step = settings.query_heads, settings.seed, 0
        self.queries = MeanNet(settings, "queries")
        self.keys = MeanNet(settings, "keys")

    def redraw(self, step: int) -> None:
        """Take the noise of a training step."""
        self.step = step

    def noise(self, numbers: Tensor, width: int, heads: slice = slice(None)) -> Tensor:
        """(B or 1, H, S, d) of `heads` for the chunks `numbers` (B or 1, S) of their documents."""
        groups = range(int(numbers.max()) // NOISE_GROUP + 1)
        drawn = [
            torch.cat(
                [
                    torch.randn(NOISE_GROUP, width, generator=generator(self.seed, head, self.step, group))
                    for group in groups
                ]
            )
            for head in self.query_heads[heads]
        ]
        return torch.stack(drawn)[:, numbers.cpu()].transpose(0, 1)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        real_q: Tensor,
        real_k: Tensor,
        numbers: Tensor,
        heads: slice = slice(None),
    ) -> tuple[Tensor, Tensor]:
        """Keys k_c (B, H, S, d) and values beta_c (B, H, S, D) of S chunks.

        q: (B, H, S, s_q, d); k, v: (B, H, S, s, .); real_q, real_k: (B or 1, S, s) bool; numbers: (B or 1,
        S), the place of each chunk among those of its document; heads: which of the query heads these are.
        """
        # Means over tokens, of which half precision would leave 8 bits.
        q, k, v = (x.to(accum_dtype(x.dtype)) for x in (q, k, v))
        q_c = self.queries(self._mean(q, real_q))
        k_c = self.keys(self._mean(k, real_k))
        omega = self.share * (q_c + k_c)
        if self.training:
            omega = omega + self.noise(numbers, omega.shape[3], heads).to(omega)
        return k_c, control_variates(omega, k, v, real_k)

    def _mean(self, x: Tensor, real: Tensor) -> Tensor:
        """(B, H, S, s, d) -> (B, H, S, d) over what is real; 0 where nothing is."""
        weights = real[:, None, ..., None].to(x.dtype)
        counts = x.shape[3] if self.count_padding else weights.sum(3).clamp(min=1)
        return (x * weights).sum(3) / counts


def _every_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v for each query head: chunks are summarized with the queries of a head."""
    group = q.shape[1] // k.shape[1]
    return k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def _cut(x: Tensor, size: int) -> Tensor:
    """(B, H, N, d) -> (B, H, ceil(N / size), size, d), zeros behind the last token."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))


def _numbers(real: Tensor) -> Tensor:
    """(1, S): chunks in order."""
    return torch.arange(real.shape[1], device=real.device)[None]


def _real(length: int, size: int, counts: Tensor | None, device: torch.device) -> Tensor:
    """(B or 1, ceil(length / size), size) bool: places before `counts`, or before `length`."""
    ends = torch.tensor([length], device=device) if counts is None else counts
    places = torch.arange(-(-length // size) * size, device=device)
    return (places < ends[:, None]).unflatten(1, (-1, size))


class EvaAttention(AttentionLayer):
    """EVA over a sequence, tokens seeing both ways. A sequence is one document; its shards trade tokens for heads."""

    def __init__(self, form: Attention, settings: LayerSettings):
        super().__init__(form, settings)
        self.form = form.eva or Eva()
        self.summaries = Summaries(settings, 0.5, count_padding=self.form.published_padding)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        q, k = inputs.rotated(q, k)
        ulysses = Ulysses(inputs.cp_shard, q.shape[1], k.shape[1])
        q, (k, v) = ulysses.of_queries(q), ulysses.of_keys(k, v)
        k, v = _every_head(q, k, v)
        size, window, length = self.form.chunk_size, self.form.window_size, q.shape[2]
        counts = inputs.counts
        real = _real(length, size, counts, q.device)
        keys, values = self.summaries(
            *(_cut(x, size) for x in (q, k, v)), real, real, _numbers(real), ulysses.query_heads
        )
        there = torch.ones_like(real) if self.form.published_padding else real
        seen = there.any(-1)[:, None].expand(-1, -(-length // window), -1)
        reach = window if self.form.overlap else 0
        if self.form.exclude_window:
            seen = seen & ~self._inside(length, reach, q.device)
        windows = Windows(
            _reaching(_cut(k, window), reach),
            _reaching(_cut(v, window), reach),
            _reaching(_real(length, window, counts, q.device)[:, None, ..., None], reach)[:, 0, ..., 0],
            window,
        )
        return ulysses.cut(eva_attention(q, windows, Chunks(keys, values, seen))), None

    def _inside(self, length: int, reach: int, device: torch.device) -> Tensor:
        """(M, C) bool: the chunk lies inside what the window reaches."""
        window, size = self.form.window_size, self.form.chunk_size
        starts = torch.arange(0, length, window, device=device)[:, None]
        chunks = torch.arange(0, length, size, device=device)
        last = torch.clamp(chunks + size, max=length)
        return (chunks >= starts - reach) & (last <= torch.clamp(starts + window + reach, max=length))


def _reaching(x: Tensor, reach: int) -> Tensor:
    """Windows (B, H, M, w, d) with the `reach` tokens before and after them, zeros or False outside the sequence."""
    if reach == 0:
        return x
    window = x.shape[3]
    flat = F.pad(x.flatten(2, 3), (0, 0, reach, reach))
    return flat.unfold(2, window + 2 * reach, window).transpose(-1, -2)


class CausalEvaAttention(AttentionLayer):
    """EVA where a token sees its window up to itself, and the chunks that end before its own begins."""

    def __init__(self, form: Attention, settings: LayerSettings):
        super().__init__(form, settings)
        self.form = eva = form.eva or Eva()
        self.blocks = 2 if eva.overlap else 1
        self.near_window = (eva.window_size, self.blocks)
        self.halo = max(eva.window_size * self.blocks, eva.chunk_size)
        self.summaries = Summaries(settings, 1.0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        q, k = inputs.rotated(q, k)
        k, v = _every_head(q, k, v)
        length, width = q.shape[2], q.shape[3]
        # A chunk's summary needs its queries, too: they travel with the keys.
        both = torch.cat([k, q], -1)
        tail, before = inputs.state or (empty_tail(both, v, self.halo), None)
        if inputs.cp_shard.size > 1:
            tail = inputs.halo(both, v, self.halo)
        positions = inputs.at
        own = self._landmarks(both, v, tail, positions)
        landmarks = gathered(inputs.cp_shard, own, length, before)
        seen = sight(positions, length, q.device, size=self.form.chunk_size, skipped=1)
        if self.form.exclude_window:
            apart = sight(positions, length, q.device, size=self.form.window_size, skipped=self.blocks)
            seen = seen._replace(limit=torch.minimum(seen.limit, apart.limit))
        out = landmark_attention(
            q,
            k,
            v,
            landmarks,
            seen,
            window=LocalWindow(self.form.window_size, self.blocks, None),
            tail=Tail(tail.keys[..., :width], tail.values),
            positions=positions,
        )
        return out, LandmarkState(tail.after(both, v), landmarks.moved(length))

    def _landmarks(self, both: Tensor, v: Tensor, tail: Tail, positions: Positions) -> Landmarks:
        """The summaries of the chunks that end among these tokens."""
        size = self.form.chunk_size
        found = complete_blocks(positions, both.shape[2], both.device, size)
        k, q = found.of(tail.keys, both).chunk(2, -1)
        v = found.of(tail.values, v)
        real = torch.ones(1, k.shape[2], size, dtype=torch.bool, device=k.device)
        numbers = (found.last_positions() // size).clamp(min=0)
        keys, values = self.summaries(q, k, v, real, real, numbers)
        return Landmarks(keys[:, :, :, None], values[:, :, :, None], found.ends)


class FlurkaEvaAttention(LowRankAttention):
    """FLuRKA-EVA: windows of queries, among which the d_k compressed keys are divided equally as EVA's chunks.

    The keys of a window are those of its chunk, and all chunks are summarized for all windows.
    """

    def __init__(self, form: Attention, settings: LayerSettings):
        super().__init__(form, settings)
        self.form = form.eva or Eva()
        self.summaries = Summaries(settings, 0.5)

    def _attend(
        self,
        q: Tensor,
        landmarks: Compressed,
        priors: Tensor | None,
        counts: Tensor | None,
        cp_shard: ContextParallelShard,
    ) -> Tensor:
        ulysses = Ulysses(cp_shard, q.shape[1], landmarks.keys.shape[1])
        q = ulysses.of_queries(q)
        # Every shard holds the landmarks of all heads.
        k, v = _every_head(q, *(ulysses.of_key_heads(x, 1) for x in (landmarks.keys, landmarks.values)))
        window, length = self.form.window_size, q.shape[2]
        real_q = _real(length, window, counts, q.device)
        index, real_k = shares_of_windows(real_q.any(-1), k.shape[2])
        k, v = (_taken(x, index) for x in (k, v))
        keys, values = self.summaries(
            _cut(q, window), k, v, real_q, real_k, _numbers(real_q), ulysses.query_heads
        )
        seen = real_k.any(-1)[:, None].expand(-1, real_q.shape[1], -1)
        if self.form.exclude_window:
            seen = seen & ~torch.eye(seen.shape[2], dtype=torch.bool, device=q.device)
        return ulysses.cut(eva_attention(q, Windows(k, v, real_k, window), Chunks(keys, values, seen)))


def shares_of_windows(windows: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Which of `keys` belong to each window: index (B or 1, M, g), and (B or 1, M, g) bool where there is one.

    windows: (B or 1, M) bool, which windows hold a query; the first ones of a sequence do.
    """
    share = -(-keys // windows.sum(1).clamp(min=1))
    within = torch.arange(int(share.max()), device=windows.device)
    places = torch.arange(windows.shape[1], device=windows.device)
    index = places[:, None] * share[:, None, None] + within
    real = (within < share[:, None, None]) & (index < keys) & windows[..., None]
    return index.clamp(max=keys - 1), real


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """(B, H, L, d) at (B or 1, M, g) -> (B, H, M, g, d)."""
    if len(index) == 1:
        return x[:, :, index[0]]
    flat = index.flatten(1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return x.gather(2, flat).unflatten(2, index.shape[1:])
