"""Options, parameters, inputs and state of a FLuRKA layer, and the pooling of landmarks."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megakernel.ops.documents import Positions
from megakernel.ops.feature_maps import Map, start_state
from megakernel.ops.mixture import shifted
from megakernel.ops.partial_output import with_ones
from megakernel.ops.projections import Projection, logits_per_head
from megakernel.ops.state import Exchange, KernelState
from megakernel.ops.window import Rotation, Tail

NearKind = Literal["softmax", "kernel"]
FarRope = Literal["none", "centroid"]


class FlurkaOptions(NamedTuple):
    """The fixed options of a layer (docs/formulas.md, 4)."""

    feature_map: Map | str

    block_size: int
    """b"""

    blocks: int
    """1: a token attends to its current block exactly; 2: also to the previous one."""

    near: NearKind
    rotary: Rotation | None
    far_rope: FarRope

    @property
    def near_rotary(self) -> Rotation | None:
        """Rotation of the near part. A kernel shares phi(q) with the far part, so it takes that part's rotation."""
        return self.rotary if self.near == "softmax" else self.far_rotary

    @property
    def far_rotary(self) -> Rotation | None:
        """Rotation of far queries and landmarks."""
        return self.rotary if self.far_rope == "centroid" else None


class Weights(NamedTuple):
    """The learned tensors of a layer."""

    projection: Projection | None
    """Of the feature map."""

    pool_keys: Tensor
    """E, (r, b) or (H_kv, r, b)."""

    pool_values: Tensor
    """F, of the shape of E."""

    far_mass: Tensor | None
    """beta, (H_kv,): a landmark has the token count (b / r) exp(beta)."""

    far_weight: Tensor | None
    """gamma, (H,): the factor exp(gamma) of the far part under one normalizer."""

    priors: Tensor | None
    """pi, (H_kv, M): weights of the M keys of a token or landmark; None if there is one key."""

    shift: Tensor | None
    """b, (H_kv, M, d): the M keys are k + b_r; None if k already holds M keys."""

    gate_weight: Tensor | None
    """w, (H, d): the gate's logits are those of `FlurkaInputs.gate` plus q.w; None is 0."""


class FlurkaInputs(NamedTuple):
    """Validated arguments of a backend other than queries, keys and values."""

    options: FlurkaOptions
    weights: Weights
    gate: Tensor | None
    """(B, H, N) logits, without q.w."""

    positions: Positions
    far: KernelState | None
    """The entering far state; None if there are no earlier landmarks."""

    tail: Tail | None
    exchange: Exchange | None = None
    """If given, the entering far state comes from it, and the returned one is what these tokens alone add."""

    log_decay: Tensor | None = None
    """(B, H_kv, N) log factor of the far state after each token; None: no decay."""

    return_state: bool = True
    """Whether the caller needs the final state."""

    @property
    def of_sequence(self) -> tuple[Positions, KernelState | None, Exchange | None, bool]:
        """The arguments of an `Operator` behind its tensors: what comes before and after these tokens."""
        return self.positions, None if self.tail is None else self.far, self.exchange, self.return_state

    def gate_logits(self, q: Tensor) -> Tensor | None:
        """(B, H, N) logits of the gate for queries (B, H, N, d); None without a gate."""
        weight = self.weights.gate_weight
        if self.gate is None or weight is None:
            return self.gate
        return logits_per_head(q, weight) + self.gate

    def initial_far(self, q: Tensor, k: Tensor, v: Tensor) -> KernelState:
        """The far state before these tokens, empty by default; k as packed by `pack_keys`."""
        if self.far is not None:
            return self.far
        keys, projection = k[..., : q.shape[-1]], self.weights.projection
        return start_state(self.options.feature_map, keys, projection, v.shape[-1])


class FlurkaState(NamedTuple):
    """The recurrent state of a sequence; its size does not depend on the number of tokens."""

    far: KernelState | None
    """The landmarks that every later token of the open document sees; None if there are none yet."""

    tail: Tail
    """The last b * blocks tokens."""


def landmarks_of(
    keys: Tensor,
    values: Tensor,
    pools: tuple[Tensor, ...],
    at: Tensor,
    ends: Tensor,
    options: FlurkaOptions,
    weights: Weights,
) -> tuple[Tensor, Tensor]:
    """Landmarks (B, H_kv, C, r, d) of C runs of tokens, and their token counts times [v, 1].

    keys, values: (B, H_kv, C, W, .). pools: E and F, broadcastable to (B, H_kv, C, r, W). at: (B, C) positions of the
    tokens after which they are visible; ends: (B, C) bool, False if there is no such token; the token count is then 0.
    """
    of_keys, of_values = (pool.to(keys.dtype) for pool in pools)
    landmarks = shifted(of_keys @ keys, weights.shift)
    size, rank = options.block_size, landmarks.shape[3]
    if options.far_rotary:
        center = at - (options.blocks - 1) * size - (size - 1) / 2
        flat = options.far_rotary(landmarks.flatten(2, 3), center.repeat_interleave(rank, 1))
        landmarks = flat.unflatten(2, (-1, rank))
    token_count = ends[:, None, :, None, None].to(keys.dtype) * (size / rank)
    if weights.far_mass is not None:
        token_count = token_count * torch.exp(weights.far_mass.to(keys.dtype))[:, None, None, None]
    return landmarks, with_ones(of_values @ values, token_count)
