"""What a FLuRKA layer is, what it learns and what it carries."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megakernel.ops.documents import Positions
from megakernel.ops.feature_maps import FeatureMap
from megakernel.ops.mixture import shifted
from megakernel.ops.partial_output import with_ones
from megakernel.ops.phi import start_state
from megakernel.ops.projections import Projection
from megakernel.ops.state import Exchange, KernelState
from megakernel.ops.window import Rotary, Tail

NearKind = Literal["softmax", "kernel"]
FarRope = Literal["none", "centroid"]


class Form(NamedTuple):
    """The fixed answers of a layer (docs/formulas.md, 4)."""

    feature_map: FeatureMap | str

    block_size: int
    """b"""

    blocks: int
    """1: a token attends its current block exactly; 2: also the previous one."""

    near: NearKind
    rotary: Rotary | None
    far_rope: FarRope

    @property
    def near_rotary(self) -> Rotary | None:
        """Rotation of the near part: of a softmax always, of a kernel with the far part, whose phi(q) it shares."""
        return self.rotary if self.near == "softmax" else self.far_rotary

    @property
    def far_rotary(self) -> Rotary | None:
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
    """beta, (H_kv,): a landmark counts (b / r) exp(beta) times."""

    far_weight: Tensor | None
    """gamma, (H,): the far part counts exp(gamma) times beside the near part."""

    priors: Tensor | None
    """pi, (H_kv, M): what each of the M keys of a token or landmark counts; None where one stands there."""

    shift: Tensor | None
    """b, (H_kv, M, d): the M keys are k + b_r; None where they are given."""


class FlurkaInputs(NamedTuple):
    """What implementations are given beside queries, keys and values, checked."""

    form: Form
    weights: Weights
    gate: Tensor | None
    """(B, H, N) logits."""

    positions: Positions
    far: KernelState | None
    """None: no landmark is behind."""

    tail: Tail | None
    exchange: Exchange | None = None
    """What enters then comes from there, and the far state is what these tokens alone add to `far`."""

    log_decay: Tensor | None = None
    """(B, H_kv, N) log of what is left of the far state behind each token; None: all of it."""

    wants_state: bool = True
    """Whether anybody reads what is left behind."""

    def entering(self, q: Tensor, k: Tensor, v: Tensor) -> KernelState:
        """The far state before these tokens, empty where there is none; k as `pack_keys` packs it."""
        if self.far is not None:
            return self.far
        keys, projection = k[..., : q.shape[-1]], self.weights.projection
        return start_state(self.form.feature_map, keys, projection, v.shape[-1])


class FlurkaState(NamedTuple):
    """What a sequence carries from shard to shard: constant in the number of tokens."""

    far: KernelState | None
    """The landmarks of blocks that every later token of the open document sees; None: none is behind."""

    tail: Tail
    """The last b * blocks tokens."""


def landmarks_of(
    keys: Tensor,
    values: Tensor,
    pools: tuple[Tensor, ...],
    at: Tensor,
    ends: Tensor,
    form: Form,
    weights: Weights,
) -> tuple[Tensor, Tensor]:
    """Landmarks (B, H_kv, C, r, d) of C stretches of tokens, and their token counts times [v, 1].

    keys, values: (B, H_kv, C, W, .). pools: E and F, broadcastable to (B, H_kv, C, r, W). at: (B, C) positions of the
    tokens that bring them into sight; ends: (B, C) bool, False where none does, and their token count is 0.
    """
    of_keys, of_values = (pool.to(keys.dtype) for pool in pools)
    landmarks = shifted(of_keys @ keys, weights.shift)
    size, rank = form.block_size, landmarks.shape[3]
    if form.far_rotary:
        centre = at - (form.blocks - 1) * size - (size - 1) / 2
        flat = form.far_rotary(landmarks.flatten(2, 3), centre.repeat_interleave(rank, 1))
        landmarks = flat.unflatten(2, (-1, rank))
    token_count = ends[:, None, :, None, None].to(keys.dtype) * (size / rank)
    if weights.far_mass is not None:
        token_count = token_count * torch.exp(weights.far_mass.to(keys.dtype))[:, None, None, None]
    return landmarks, with_ones(of_values @ values, token_count)
