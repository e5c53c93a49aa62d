"""Causal softmax over a token's window and the landmarks of earlier blocks (the low-rank parent of FLuRKA, and EVA)."""

from torch import Tensor

from megakernel.ops.arguments import check_heads, check_per_head, expand_tokens
from megakernel.ops.dispatch import choose
from megakernel.ops.documents import Positions
from megakernel.ops.landmark_attention import chunked, reference
from megakernel.ops.landmark_attention.form import Landmarks, Sight
from megakernel.ops.mixture import first_key, pack_keys
from megakernel.ops.window import Tail, Window

IMPLEMENTATIONS = {"chunked": chunked.attend, "reference": reference.attend}
"""Backend -> implementation."""


def landmark_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    landmarks: Landmarks,
    sight: Sight,
    *,
    window: Window,
    tail: Tail,
    mass: float = 1.0,
    priors: Tensor | None = None,
    shift: Tensor | None = None,
    far_weight: Tensor | None = None,
    gate: Tensor | None = None,
    positions: Positions = 0,
    backend: str | None = None,
) -> Tensor:
    """Weights exp(q.k / sqrt(d)) over the window and over all landmarks in sight; quadratic in their number.

    Args:
        q: (B, H, N, d).
        k: (B, H_kv, N, d), H a multiple of H_kv; (B, H_kv, M, N, d) with priors and no shift.
        v: (B, H_kv, N, D).
        landmarks: of every block that a query may see, whichever shard it came from.
        sight: which of them each query sees.
        window: what a token sees exactly.
        tail: at least the window.block_size * window.blocks tokens before these.
        mass: how many tokens a landmark stands for.
        priors: pi (H_kv, M) >= 0 of mixture keys: tokens and landmarks weigh sum_r pi_r exp(q.k_r / sqrt(d)).
        shift: b (H_kv, M, d), beside priors: the keys of a token are k + b_r; those of landmarks are handed in.
        far_weight: gamma (H,), multiplies landmarks by exp(gamma) under the common normalizer; None is 0.
        gate: logits of the window's share, broadcastable to (B, H, N): window and landmarks are then normalized
            apart. None: one normalizer for both.
        positions: (B, N) positions within documents, or the position of the first token of rows that hold one
            document each.
        backend: reference or chunked.

    Returns:
        (B, H, N, D) in the dtype of v. Where no landmark is in sight, the window alone.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, naming the argument.
    """
    check_heads(q, first_key(k, priors, shift), v)
    check_per_head("far_weight", far_weight, q.shape[1])
    if gate is not None:
        gate = expand_tokens("gate", gate, q)
    return choose(IMPLEMENTATIONS, backend)(
        q,
        pack_keys(k),
        v,
        landmarks,
        sight,
        window=window,
        tail=tail,
        mass=mass,
        priors=priors,
        shift=shift,
        far_weight=far_weight,
        gate=gate,
        positions=positions,
    )
