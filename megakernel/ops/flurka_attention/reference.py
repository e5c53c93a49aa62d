"""Causal FLuRKA straight from the formula, token by token and block by block; other backends are tested against it."""

import torch
from torch import Tensor

from megakernel.ops.documents import carry_factor, token_positions
from megakernel.ops.flurka_attention.options import FlurkaInputs, FlurkaOptions, Weights
from megakernel.ops.kernel_attention.reference import per_query_head, phi
from megakernel.ops.mixture import by_component
from megakernel.ops.partial_output import PartialOutput, normalized
from megakernel.ops.state import KernelState
from megakernel.ops.tensors import accum_dtype
from megakernel.ops.window import Tail, empty_tail


def attend(q: Tensor, k: Tensor, v: Tensor, inputs: FlurkaInputs) -> tuple[Tensor, KernelState, Tail]:
    """Same arguments and results as `chunked.attend`."""
    options, weights, _, positions, _, tail, exchange, log_decay, _ = inputs
    gate = inputs.gate_logits(q)
    far = inputs.initial_far(q, k, v)
    if tail is None:
        tail = empty_tail(k, v, options.block_size * options.blocks)
    batch, heads, length, _ = q.shape
    dtype, device = accum_dtype(q.dtype), q.device
    at = token_positions(positions, length, device).expand(batch, -1)
    sequences = [
        _Sequence(
            q[b].to(dtype),
            torch.cat([tail.keys[b], k[b]], 1).to(dtype),
            torch.cat([tail.values[b], v[b]], 1).to(dtype),
            at[b],
            options,
            weights,
            q.new_zeros(k.shape[1], length, dtype=dtype) if log_decay is None else log_decay[b],
        )
        for b in range(batch)
    ]
    leaving = torch.stack([sequence.landmark_sums(length) for sequence in sequences])
    carries = carry_factor(positions, q, log_decay)
    if exchange is not None:
        far = exchange(KernelState(leaving, leaving.new_zeros(leaving.shape[:2])), carries).wait()
    entering = far.sums * torch.exp(far.log_scale)[..., None, None]
    if exchange is None:
        leaving = leaving + entering * carries.view(batch, -1, 1, 1)

    out = []
    for b, sequence in enumerate(sequences):
        for i in range(length):
            (near, log_scale), landmarks = sequence.near(i), sequence.far(i, entering[b])
            logits = None if gate is None else gate[b, :, i]
            out.append(_merge(near, log_scale, landmarks, logits, sequence.sees_far(i), weights))
    stacked = torch.stack(out).view(batch, length, heads, -1).transpose(1, 2)
    return stacked.to(v.dtype), KernelState(leaving, leaving.new_zeros(leaving.shape[:2])), tail.after(k, v)


def _merge(
    near: Tensor, log_scale: Tensor, far: Tensor, gate: Tensor | None, sees_far: bool, weights: Weights
) -> Tensor:
    """Merge the sums (H, D + 1) of the near part, times exp(log_scale), and of the far part into outputs (H, D)."""
    if not sees_far:
        return _mean(near)
    if gate is not None:
        share = torch.sigmoid(gate)[:, None]
        return share * _mean(near) + (1 - share) * _mean(far)
    if weights.far_weight is not None:
        far = far * torch.exp(weights.far_weight)[:, None]
    common = log_scale.clamp(min=0)
    return _mean(near * torch.exp(log_scale - common) + far * torch.exp(-common))


def _mean(sums: Tensor) -> Tensor:
    """(H, D) from sums (H, D + 1); 0 if all weights are, as with `relu` and a negative query."""
    return normalized(PartialOutput(sums, None))


class _Sequence:
    """One sequence of the batch, with the `before` tokens of its tail."""

    def __init__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        options: FlurkaOptions,
        weights: Weights,
        log_decay: Tensor,
    ):
        self.log_decay = log_decay
        self.options, self.weights, self.group = options, weights, q.shape[0] // keys.shape[0]
        self.q, self.values, self.at = q, values, positions.tolist()
        # The M keys of each position, their shifts (H_kv, 1, d) and their priors (H_kv, 1, 1).
        components, self.shares = by_component(keys[None], weights.priors, q.shape[-1])
        self.keys = components[:, 0].expand(len(self.shares), -1, -1, -1)
        self.shifts = torch.zeros_like(self.shares)
        if weights.shift is not None:
            self.shifts = weights.shift.transpose(0, 1)[:, :, None]
        self.before = keys.shape[1] - q.shape[1]
        self.positions = positions[None]

    def sees_far(self, i: int) -> bool:
        return self.at[i] >= self.options.block_size * self.options.blocks

    def near(self, i: int) -> tuple[Tensor, Tensor]:
        """Sums (H, D + 1) over the window of token i, and their log scale (H, 1).

        The log scale is the largest score under softmax, whose exp could overflow, and 0 under phi.
        """
        block = self.at[i] // self.options.block_size
        oldest = max(0, block - self.options.blocks + 1) * self.options.block_size
        last = self.before + i
        window = slice(last - (self.at[i] - oldest), last + 1)
        positions = torch.arange(oldest, self.at[i] + 1, device=self.q.device)[None]
        values = self._with_ones(self.values[:, window])
        similarities = []
        for shift, component in zip(self.shifts, self.keys):
            q, keys = self.q[None, :, i : i + 1], component[None, :, window] + shift
            if rotary := self.options.near_rotary:
                q, keys = rotary(q, positions[:, -1:]), rotary(keys, positions)
            similarities.append(self._near_similarity(q, keys)[0, :, 0])
        # (M, H, W), by the M keys of each position.
        weights, log_scale = torch.stack(similarities), values.new_zeros(len(self.q), 1)
        if self.options.near != "kernel":
            log_scale = weights.detach().amax((0, 2))[:, None]
            weights = torch.exp(weights - log_scale)
        weights = (weights * self.shares.repeat_interleave(self.group, 1)[..., 0]).sum(0)
        return (weights[:, None] @ values.repeat_interleave(self.group, 0))[:, 0], log_scale

    def _near_similarity(self, q: Tensor, keys: Tensor) -> Tensor:
        """Weights (1, H, 1, W) of one query and the keys of its window; under softmax, their logarithms."""
        if self.options.near == "kernel":
            return self._phi_q(q) @ self._phi_k(keys).repeat_interleave(self.group, 1).transpose(-1, -2)
        return q @ keys.repeat_interleave(self.group, 1).transpose(-1, -2) * q.shape[-1] ** -0.5

    def far(self, i: int, entering: Tensor) -> Tensor:
        """Sums (H, D + 1) over the landmarks that token i sees, including those in `entering` (H_kv, F, D + 1)."""
        state = self.landmark_sums(i)
        if self.at[i] > i:
            state = state + entering * self._decay(0, i)
        q = self.q[None, :, i : i + 1]
        if rotary := self.options.far_rotary:
            q = rotary(q, self.positions[:, i : i + 1])
        return (self._phi_q(q) @ state.repeat_interleave(self.group, 0))[0, :, 0]

    def landmark_sums(self, i: int) -> Tensor:
        """(H_kv, F, D + 1): the landmarks visible at place i that became visible in this shard.

        Block J of a document becomes visible at the end of block J + blocks - 1. Place `length` is the token
        after the shard, if it continues the last document.
        """
        b, blocks = self.options.block_size, self.options.blocks
        position = self.at[i] if i < len(self.at) else self.at[-1] + 1
        document = self.before + i - position
        phi_k = self._phi_k(self.keys[0][None, :, :1])
        total = self.values.new_zeros(len(self.values), phi_k.shape[-1], self.values.shape[-1] + 1)
        for block in range(position // b - blocks + 1):
            end = document + (block + blocks) * b - 1 - self.before
            if end >= 0:
                total = total + self._landmarks(document + block * b, block) * self._decay(end + 1, i)
        return total

    def _decay(self, start: int, end: int) -> Tensor:
        """(H_kv, 1, 1): the decay factor of the far state over places `start` to `end` - 1."""
        return self.log_decay[:, start:end].sum(1).exp()[:, None, None]

    def _landmarks(self, start: int, block: int) -> Tensor:
        """sum_s m_s sum_r pi_r phi(k_sr) [v_s, 1] of one block, whose first token is at `start`."""
        b = self.options.block_size
        values = self.weights.pool_values @ self.values[:, start : start + b]
        rank = values.shape[1]
        token_count = values.new_tensor(b / rank)
        if self.weights.far_mass is not None:
            token_count = token_count * torch.exp(self.weights.far_mass)[:, None, None]
        center = values.new_full((1, rank), block * b + (b - 1) / 2, dtype=torch.float64)
        phi_k = []
        for share, shift, component in zip(self.shares, self.shifts, self.keys):
            keys = (self.weights.pool_keys @ component[:, start : start + b] + shift)[None]
            if rotary := self.options.far_rotary:
                keys = rotary(keys, center)
            phi_k.append(share * self._phi_k(keys)[0])
        return (token_count * sum(phi_k)).transpose(-1, -2) @ self._with_ones(values)

    def _phi_q(self, x: Tensor) -> Tensor:
        return phi(self.options.feature_map, x, per_query_head(self.weights.projection, self.group))

    def _phi_k(self, x: Tensor) -> Tensor:
        return phi(self.options.feature_map, x, self.weights.projection)

    @staticmethod
    def _with_ones(values: Tensor) -> Tensor:
        return torch.cat([values, torch.ones_like(values[..., :1])], -1)
