"""Causal FLuRKA: kernel attention to landmarks of earlier blocks, exact attention in a window (docs/formulas.md, 4)."""

from types import ModuleType

from torch import Tensor

from megakernel.ops.arguments import (
    check_cached,
    check_choice,
    check_entering,
    check_feature_map,
    check_gate_weight,
    check_heads,
    check_per_head,
    check_pools,
    check_positions,
    expand_log_decay,
    expand_tokens,
)
from megakernel.ops.dispatch import COMPOSED, Implementation, Kernels, choose
from megakernel.ops.documents import Positions, token_positions
from megakernel.ops.feature_maps import Map, check_state
from megakernel.ops.flurka_attention import chunked, reference
from megakernel.ops.flurka_attention.options import (
    FarRope,
    FlurkaInputs,
    FlurkaOptions,
    FlurkaState,
    NearKind,
    Weights,
)
from megakernel.ops.mixture import first_key, pack_keys, packed_rotary
from megakernel.ops.projections import Projection
from megakernel.ops.state import Exchange
from megakernel.ops.window import Rotation


def _kernels() -> ModuleType:
    from megakernel.ops.flurka_attention import triton

    return triton


def _composed() -> ModuleType:
    from megakernel.ops.flurka_attention import composed

    return composed


IMPLEMENTATIONS: dict[str, Implementation] = {
    "chunked": chunked.attend,
    "reference": reference.attend,
    "triton": Kernels("flurka_attention", _kernels),
    COMPOSED: Kernels("flurka_attention", _composed, backend=COMPOSED),
}
"""Backend -> implementation."""


def flurka_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: Map | str,
    pool_keys: Tensor,
    pool_values: Tensor,
    projection: Projection | None = None,
    near: NearKind = "softmax",
    blocks: int = 1,
    priors: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    gate_weight: Tensor | None = None,
    far_mass: Tensor | None = None,
    far_weight: Tensor | None = None,
    log_decay: Tensor | None = None,
    rotary: Rotation | None = None,
    far_rope: FarRope = "none",
    positions: Positions = 0,
    initial_state: FlurkaState | None = None,
    return_state: bool = True,
    exchange: Exchange | None = None,
    backend: str | None = None,
) -> tuple[Tensor, FlurkaState | None]:
    """Causal FLuRKA, linear in sequence length: eq. 2 of the paper made causal (docs/formulas.md, 4).

    Token i of a document is in block J = i // b. It attends exactly to the tokens of block J up to itself (with
    blocks=2 also to block J - 1), and through phi(q).phi(E K) to the r landmarks of every earlier block, each with the
    token count (b / r) exp(beta).

    Args:
        q: (B, H, N, d).
        k: (B, H_kv, N, d), H a multiple of H_kv; (B, H_kv, M, N, d) with priors and no shift.
        v: (B, H_kv, N, D).
        feature_map: phi; see `kernel_attention`.
        pool_keys: E (r, b) or (H_kv, r, b), weights, not logits.
        pool_values: F, same shape as E.
        projection: of the feature map; see `kernel_attention`.
        near: similarity in the window, softmax for exp(q.k / sqrt(d)) or kernel for phi(q).phi(k).
        blocks: 1 current block, 2 current and previous block.
        priors: pi (H_kv, M) >= 0 of mixture keys: the weight of a token or landmark is a sum over its M keys, far
            sum_r pi_r phi(q).phi(E K_r), near sum_r pi_r exp(q.k_r / sqrt(d)) or sum_r pi_r phi(q).phi(k_r).
        shift: b (H_kv, M, d), requires priors: tokens have the keys k_r = k + b_r, landmarks E K + b_r.
        gate: logits of the near part's share, broadcastable to (B, H, N); each part has its own normalizer. None: one
            normalizer for both, as near="kernel" requires.
        gate_weight: w (H, d), requires gate: adds q.w to the logits, with q unrotated. None is 0.
        far_mass: beta (H_kv,); None is 0.
        far_weight: gamma (H,), multiplies the far part by exp(gamma) under one normalizer; None is 0. Not with a gate.
        log_decay: log a <= 0, broadcastable to (B, H_kv, N): the last token of a block multiplies the landmarks of
            earlier blocks by a, before new ones are added. None is 0.
        rotary: rotation by positions; pass q and k unrotated, because rotated keys cannot be pooled.
        far_rope: none, or centroid: landmarks are rotated at the center of their block.
        positions: (B, N) positions within documents, or the position of the first token if each sequence holds one
            document. For a document that began in `initial_state`, they count from its start.
        initial_state: the state that sequences continue from; they can be split at any token.
        return_state: also return the state after the last token; otherwise None.
        exchange: for sequences sharded over ranks, takes the far state that these tokens add and returns the entering
            one. `initial_state` then has only the previous shard's tail, and the returned far state is what these
            tokens add.
        backend: reference, chunked, triton or composed; None reads MEGAKERNEL_BACKEND from the environment, and by
            default takes triton on a GPU and chunked elsewhere. composed is an experiment (docs/results.md).

    Returns:
        (B, H, N, D) in the dtype of v, and the state after the last token or None.

    Raises:
        ValueError: invalid shapes, dtypes, devices or names; the message names the argument.
    """
    key = first_key(k, priors, shift)
    check_heads(q, key, v)
    check_feature_map(feature_map, projection, key)
    check_pools(pool_keys, pool_values, k)
    check_choice("near", near, ("softmax", "kernel"))
    check_choice("blocks", blocks, (1, 2))
    check_choice("far_rope", far_rope, ("none", "centroid"))
    check_per_head("far_mass", far_mass, k.shape[1])
    check_per_head("far_weight", far_weight, q.shape[1])
    if gate is not None:
        if near == "kernel":
            raise ValueError(
                "gate with near='kernel': phi(q) is shared and so is the normalizer; remove gate"
            )
        if far_weight is not None:
            raise ValueError(
                "far_weight next to gate, under which each part has its own normalizer; remove one"
            )
        gate = expand_tokens("gate", gate, q)
    check_gate_weight(gate_weight, gate, q)
    check_positions(positions, q)
    size = pool_keys.shape[-1]
    if log_decay is not None:
        ends = token_positions(positions, q.shape[2], q.device) % size == size - 1
        log_decay = expand_log_decay(log_decay, key).masked_fill(~ends[:, None], 0.0)
    k = pack_keys(k)
    far, tail = initial_state or (None, None)
    if far is not None:
        check_state(far, feature_map, key, projection, v.shape[-1])
    check_entering(far, exchange)
    if tail is not None:
        check_cached("initial_state.tail", tail, k, v, size * blocks)
    options = FlurkaOptions(feature_map, size, blocks, near, packed_rotary(rotary, q.shape[-1]), far_rope)
    weights = Weights(projection, pool_keys, pool_values, far_mass, far_weight, priors, shift, gate_weight)
    inputs = FlurkaInputs(options, weights, gate, positions, far, tail, exchange, log_decay, return_state)
    out, far, tail = choose(IMPLEMENTATIONS, backend)(q, k, v, inputs)
    return out, FlurkaState(far, tail) if return_state else None
