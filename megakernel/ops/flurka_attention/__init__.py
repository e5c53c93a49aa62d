"""Causal FLuRKA: landmarks of earlier blocks under a kernel, the own block exactly (MECHANISMS section 4)."""

from torch import Tensor

from megakernel.ops.arguments import check_feature_map, check_heads, check_positions
from megakernel.ops.dispatch import choose
from megakernel.ops.documents import Positions
from megakernel.ops.flurka_attention import chunked, reference
from megakernel.ops.flurka_attention.form import FlurkaState, Form, Weights
from megakernel.ops.state import Exchange, start_state
from megakernel.ops.window import Rotary, empty_tail

IMPLEMENTATIONS = {"chunked": chunked.attend, "reference": reference.attend}
"""Backend -> implementation."""


def flurka_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str,
    pool_keys: Tensor,
    pool_values: Tensor,
    projection: Tensor | None = None,
    near: str = "softmax",
    blocks: int = 1,
    gate: Tensor | None = None,
    far_mass: Tensor | None = None,
    far_weight: Tensor | None = None,
    rotary: Rotary | None = None,
    far_rope: str = "none",
    positions: Positions = 0,
    initial_state: FlurkaState | None = None,
    exchange: Exchange | None = None,
    backend: str | None = None,
) -> tuple[Tensor, FlurkaState]:
    """Causal FLuRKA, linear in the number of tokens."""
    check_heads(q, k, v)
    check_feature_map(feature_map, projection, k)
    if isinstance(positions, Tensor):
        check_positions(positions, q)
    size = pool_keys.shape[-1]
    if initial_state is None:
        far = start_state(feature_map, k, projection, v.shape[-1])
        initial_state = FlurkaState(far, empty_tail(k, v, size * blocks))
    form = Form(feature_map, size, blocks, near, rotary, far_rope)
    weights = Weights(projection, pool_keys, pool_values, far_mass, far_weight)
    out, far, tail = choose(IMPLEMENTATIONS, backend)(
        q,
        k,
        v,
        form=form,
        weights=weights,
        gate=None if gate is None else gate.expand(q.shape[:3]),
        positions=positions,
        far=initial_state.far,
        tail=initial_state.tail,
        exchange=exchange,
    )
    return out, FlurkaState(far, tail)
