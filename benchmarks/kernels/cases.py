"""Calls of every op that has kernels, forward and backward, at training sizes; used to compile ahead of time.

Cases run while launches are recorded instead of made, so tensors have no contents.
"""

from collections.abc import Callable
from functools import partial

import torch

from megakernel.attention import Rotary
from megakernel.ops.feature_maps import FEATURE_MAPS, start_state
from megakernel.ops.flurka_attention import flurka_attention
from megakernel.ops.flurka_attention.options import FlurkaState
from megakernel.ops.kernel_attention import kernel_attention
from megakernel.ops.selected_attention import selected_attention
from megakernel.ops.short_convolution import short_convolution
from megakernel.ops.simple_gla import simple_gla
from megakernel.ops.state import KernelState
from megakernel.ops.weighted_attention import weighted_attention
from megakernel.ops.window import empty_tail

Case = Callable[[], None]


def trained_matrix(feature_map: str, heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """A projection as in training: hedgehog's is a weight, in the dtype of the tokens; those of noise are float32."""
    dtype = dtype if feature_map == "hedgehog" else torch.float32
    return torch.empty(heads, width, width, dtype=dtype, requires_grad=True)


def kernel_attention_case(
    feature_map: str,
    width: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    group: int = 1,
    causal: bool = True,
    packed: bool = False,
    weighted: bool = False,
    normalize: bool = True,
    keys: int = 0,
    length: int = 65536,
    heads: int = 1,
    matrix: torch.dtype | None = None,
) -> None:
    """One sequence, by default so long that segments have their full length.

    keys: mixture keys per position. matrix: dtype of the projection; None: that of `trained_matrix`.
    """
    q = torch.empty(1, heads * group, length, width, dtype=dtype, requires_grad=True)
    k = torch.empty(1, heads, *[keys] * (keys > 0), length, width, dtype=dtype, requires_grad=True)
    v = torch.empty(1, heads, length, width, dtype=dtype, requires_grad=True)
    projected = FEATURE_MAPS[feature_map].projected
    out = kernel_attention(
        q,
        k,
        v,
        feature_map=feature_map,
        projection=trained_matrix(feature_map, heads, width, matrix or dtype) if projected else None,
        causal=causal,
        normalize=normalize,
        priors=torch.empty(heads, keys, requires_grad=True) if keys else None,
        key_weights=torch.empty(1, heads, length, requires_grad=True) if weighted else None,
        positions=torch.zeros(1, length, dtype=torch.int64) if packed else None,
        backend="triton",
    )
    out.backward(torch.empty_like(out))


@torch.no_grad()
def step_case(
    feature_map: str, width: int, rows: int, group: int, dtype: torch.dtype = torch.bfloat16
) -> None:
    """One token of each of 64 sequences."""
    q = torch.empty(64, 8 * group, 1, width, dtype=dtype)
    k = torch.empty(64, 8, 1, width, dtype=dtype)
    projection = torch.empty(8, rows, width) if FEATURE_MAPS[feature_map].projected else None
    state = start_state(feature_map, k, projection, width)
    kernel_attention(
        q, k, k, feature_map=feature_map, projection=projection, initial_state=state, backend="triton"
    )


@torch.no_grad()
def flurka_step_case(
    feature_map: str,
    width: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    near: str = "softmax",
    gated: bool = True,
    group: int = 4,
    blocks: int = 1,
    rank: int = 8,
    decays: bool = False,
) -> None:
    """One token of each of 64 sequences, in blocks of 64."""
    q = torch.empty(64, 8 * group, 1, width, dtype=dtype)
    k = torch.empty(64, 8, 1, width, dtype=dtype)
    projection = torch.empty(8, width, width) if FEATURE_MAPS[feature_map].projected else None
    has_gate = gated and near == "softmax"
    flurka_attention(
        q,
        k,
        k,
        feature_map=feature_map,
        pool_keys=torch.empty(rank, 64),
        pool_values=torch.empty(rank, 64),
        projection=projection,
        near=near,
        blocks=blocks,
        gate=torch.empty(64, 8 * group, 1) if has_gate else None,
        gate_weight=torch.empty(8 * group, width) if has_gate else None,
        log_decay=torch.empty(64, 8, 1) if decays else None,
        rotary=Rotary(width),
        positions=torch.zeros(64, 1, dtype=torch.int64),
        initial_state=FlurkaState(
            start_state(feature_map, k, projection, width), empty_tail(k, k, 64 * blocks)
        ),
        backend="triton",
    )


def convolution_case(
    channels: int,
    width: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    packed: bool = False,
    continued: bool = False,
    length: int = 4096,
    heads: int = 8,
) -> None:
    """Queries, keys and values of as many heads, as the fused projection has them. continued: tokens come before."""
    x = torch.empty(length, 1, heads, 3, channels, dtype=dtype, requires_grad=True).permute(1, 2, 3, 0, 4)
    weight = torch.empty(heads, 3, channels, width, requires_grad=True)
    before = torch.empty(1, heads, 3, width - 1, channels, dtype=dtype) if continued else None
    positions = torch.zeros(1, length, dtype=torch.int64) if packed else 0
    out = short_convolution(x, weight, before, positions, backend="triton")
    out.backward(torch.empty_like(out))


class _Returned:
    """An exchange that returns to a shard the state that it adds."""

    def __init__(self, own: KernelState, carries: torch.Tensor):
        self._own = own

    def wait(self) -> KernelState:
        """That state."""
        return self._own


def flurka_case(
    feature_map: str,
    width: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    near: str = "softmax",
    gated: bool = True,
    group: int = 1,
    blocks: int = 1,
    packed: bool = False,
    decays: bool = False,
    length: int = 65536,
    heads: int = 1,
    matrix: torch.dtype | None = None,
    shard: bool = False,
    backend: str = "triton",
) -> None:
    """One sequence, by default so long that segments have their full length, in blocks of 64 with 8 landmarks.

    matrix: see `kernel_attention_case`. shard: whether it is a shard that exchanges states.
    """
    q = torch.empty(1, heads * group, length, width, dtype=dtype, requires_grad=True)
    k, v = (torch.empty(1, heads, length, width, dtype=dtype, requires_grad=True) for _ in range(2))
    projected = FEATURE_MAPS[feature_map].projected
    has_gate = gated and near == "softmax"
    out, _ = flurka_attention(
        q,
        k,
        v,
        feature_map=feature_map,
        pool_keys=torch.empty(8, 64, requires_grad=True),
        pool_values=torch.empty(8, 64, requires_grad=True),
        projection=trained_matrix(feature_map, heads, width, matrix or dtype) if projected else None,
        near=near,
        blocks=blocks,
        gate=torch.empty(heads * group, 1, requires_grad=True) if has_gate else None,
        gate_weight=torch.empty(heads * group, width, requires_grad=True) if has_gate else None,
        log_decay=torch.empty(1, heads, length, requires_grad=True) if decays else None,
        rotary=Rotary(width),
        positions=torch.zeros(1, length, dtype=torch.int64) if packed else length * shard,
        exchange=_Returned if shard else None,
        backend=backend,
    )
    out.backward(torch.empty_like(out))


def simple_gla_case(width: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """One sequence of packed documents, so long that segments have their full length."""
    q, k, v = (torch.empty(1, 1, 65536, width, dtype=dtype, requires_grad=True) for _ in range(3))
    log_decay = torch.empty(1, 1, 65536, requires_grad=True)
    positions = torch.zeros(1, 65536, dtype=torch.int64)
    out, _ = simple_gla(q, k, v, log_decay, positions=positions, backend="triton")
    out.backward(torch.empty_like(out))


def weighted_attention_case(
    similarity: str,
    width: int,
    keys: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    join: str = "sum",
    normalize: bool = True,
) -> None:
    """A training batch with a prior for every key."""
    q = torch.empty(2, 8, 1024, width, dtype=dtype, requires_grad=True)
    k = torch.empty(2, 4, keys, 1024, width, dtype=dtype, requires_grad=True)
    v = torch.empty(2, 4, 1024, width, dtype=dtype, requires_grad=True)
    key_weights = torch.empty(1, 4, keys, 1, requires_grad=True)
    out, _ = weighted_attention(
        q,
        k,
        v,
        similarity=similarity,
        join=join,
        key_weights=key_weights,
        normalize=normalize,
        backend="triton",
    )
    out.backward(torch.empty_like(out))


def selected_case(
    width: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    group: int = 1,
    packed: bool = False,
    unit: str = "token",
    landmarks: int = 1,
    blocks_of_group: int | None = None,
) -> None:
    """A training batch whose queries choose 8 blocks of 64 tokens."""
    q = torch.empty(2, 4 * group, 2048, width, dtype=dtype, requires_grad=True)
    k, v = (torch.empty(2, 4, 2048, width, dtype=dtype, requires_grad=True) for _ in range(2))
    positions = torch.arange(2048).expand(2, -1) % 1000 if packed else 0
    pool = torch.full((landmarks, 64), 1 / 64)
    out, _ = selected_attention(
        *(q, k, v),
        pool=pool,
        selected=8,
        unit=unit,
        group=blocks_of_group,
        positions=positions,
        backend="triton",
    )
    out.backward(torch.empty_like(out))


_linear, _weighted = partial(partial, kernel_attention_case), partial(partial, weighted_attention_case)
_flurka = partial(partial, flurka_case)
_gla = partial(partial, simple_gla_case)

CASES: dict[str, Case] = {
    "kernel_attention elu d=64": _linear("elu", 64),
    "kernel_attention elu d=128": _linear("elu", 128),
    "kernel_attention elu d=128, 4 queries a key": _linear("elu", 128, group=4),
    "kernel_attention elu d=128, documents": _linear("elu", 128, packed=True),
    "kernel_attention elu d=128, both ways": _linear("elu", 128, causal=False),
    "kernel_attention elu d=64 float32": _linear("elu", 64, torch.float32),
    "kernel_attention identity d=128, not normalized": _linear("identity", 128, normalize=False),
    "kernel_attention relu d=128": _linear("relu", 128),
    "kernel_attention hedgehog d=64": _linear("hedgehog", 64),
    "kernel_attention hedgehog d=128": _linear("hedgehog", 128),
    "kernel_attention hedgehog d=128, W in float32": _linear("hedgehog", 128, matrix=torch.float32),
    "kernel_attention hedgehog d=64, 4 queries a key": _linear("hedgehog", 64, group=4),
    "kernel_attention hedgehog d=128, 4 queries a key": _linear("hedgehog", 128, group=4),
    "kernel_attention favor d=64": _linear("favor", 64),
    "kernel_attention favor d=128": _linear("favor", 128),
    "kernel_attention prf d=128": _linear("prf", 128),
    "kernel_attention favor d=64 float32": _linear("favor", 64, torch.float32),
    "kernel_attention favor d=128, documents": _linear("favor", 128, packed=True),
    "kernel_attention hedgehog d=128, key weights": _linear("hedgehog", 128, weighted=True),
    "kernel_attention hedgehog d=64 float32": _linear("hedgehog", 64, torch.float32),
    "kernel_attention rks d=64": _linear("rks", 64),
    "kernel_attention rks d=128": _linear("rks", 128),
    "kernel_attention rks d=64 float32": _linear("rks", 64, torch.float32),
    "kernel_attention elu d=64, 2 keys": _linear("elu", 64, keys=2),
    "kernel_attention elu d=128, 2 keys": _linear("elu", 128, keys=2),
    "kernel_attention rks d=64, 2 keys": _linear("rks", 64, keys=2),
    "kernel_attention hedgehog d=128, 2 keys": _linear("hedgehog", 128, keys=2),
    "kernel_attention favor d=64, 2 keys": _linear("favor", 64, keys=2),
    "kernel_attention favor d=128, 2 keys": _linear("favor", 128, keys=2),
    "one token elu d=64, 4 queries a key": partial(step_case, "elu", 64, 64, 4),
    "one token hedgehog d=128, 8 queries a key": partial(step_case, "hedgehog", 128, 128, 8),
    "one token rks d=128 float32": partial(step_case, "rks", 128, 128, 4, torch.float32),
    "one token prf d=128, M=256": partial(step_case, "prf", 128, 256, 4),
    "short convolution d=64": partial(convolution_case, 64, 4),
    "short convolution d=128, documents": partial(convolution_case, 128, 4, packed=True),
    "short convolution d=128, 8 taps, float32": partial(convolution_case, 128, 8, torch.float32),
    "short convolution d=64, documents of several shards": partial(
        convolution_case, 64, 4, packed=True, continued=True
    ),
    "FLuRKA elu d=64": _flurka("elu", 64),
    "FLuRKA elu d=128": _flurka("elu", 128),
    "FLuRKA hedgehog d=64": _flurka("hedgehog", 64),
    "FLuRKA hedgehog d=64, documents": _flurka("hedgehog", 64, packed=True),
    "FLuRKA hedgehog d=64, 2 blocks, documents": _flurka("hedgehog", 64, blocks=2, packed=True),
    "FLuRKA hedgehog d=64, kernel window": _flurka("hedgehog", 64, near="kernel"),
    "FLuRKA hedgehog d=128": _flurka("hedgehog", 128),
    "FLuRKA hedgehog d=128, W in float32": _flurka("hedgehog", 128, matrix=torch.float32),
    "FLuRKA hedgehog d=128, documents": _flurka("hedgehog", 128, packed=True),
    "FLuRKA hedgehog d=128, kernel window": _flurka("hedgehog", 128, near="kernel"),
    "FLuRKA favor d=64, one normalizer": _flurka("favor", 64, gated=False),
    "FLuRKA favor d=128": _flurka("favor", 128),
    "FLuRKA hedgehog d=64, shard": _flurka("hedgehog", 64, shard=True),
    "FLuRKA hedgehog d=128, shard": _flurka("hedgehog", 128, shard=True),
    "FLuRKA hedgehog d=128, one normalizer, shard, documents": _flurka(
        "hedgehog", 128, gated=False, shard=True, packed=True
    ),
    "FLuRKA elu d=64, decay": _flurka("elu", 64, decays=True),
    "FLuRKA elu d=128, decay": _flurka("elu", 128, decays=True),
    "FLuRKA favor d=64, one normalizer, decay": _flurka("favor", 64, gated=False, decays=True),
    "FLuRKA hedgehog d=64, composed": _flurka("hedgehog", 64, backend="composed"),
    "FLuRKA hedgehog d=128, composed": _flurka("hedgehog", 128, backend="composed"),
    "FLuRKA favor d=128, one normalizer, documents, composed": _flurka(
        "favor", 128, gated=False, packed=True, backend="composed"
    ),
    "FLuRKA, one token, elu d=64": partial(flurka_step_case, "elu", 64),
    "FLuRKA, one token, hedgehog d=64": partial(flurka_step_case, "hedgehog", 64),
    "FLuRKA, one token, hedgehog d=64, kernel window": partial(
        flurka_step_case, "hedgehog", 64, near="kernel", group=1
    ),
    "FLuRKA, one token, hedgehog d=128": partial(flurka_step_case, "hedgehog", 128),
    "FLuRKA, one token, hedgehog d=128, kernel window, 2 blocks": partial(
        flurka_step_case, "hedgehog", 128, near="kernel", blocks=2
    ),
    "FLuRKA, one token, hedgehog d=128, one normalizer, 32 landmarks": partial(
        flurka_step_case, "hedgehog", 128, gated=False, group=8, rank=32
    ),
    "FLuRKA, one token, elu d=128, decay": partial(flurka_step_case, "elu", 128, decays=True),
    "FLuRKA, one token, favor d=128": partial(flurka_step_case, "favor", 128),
    "FLuRKA, one token, rks d=128 float32": partial(flurka_step_case, "rks", 128, torch.float32),
    "simple_gla d=64, documents": _gla(64),
    "simple_gla d=128, documents": _gla(128),
    "simple_gla d=64 float32, documents": _gla(64, torch.float32),
    "weighted_attention softmax d=64": _weighted("softmax", 64, 1),
    "weighted_attention gaussian d=64": _weighted("gaussian", 64, 1),
    "weighted_attention gaussian d=128": _weighted("gaussian", 128, 1),
    "weighted_attention gaussian d=64, 2 keys": _weighted("gaussian", 64, 2),
    "weighted_attention gaussian d=128, 2 keys": _weighted("gaussian", 128, 2),
    "weighted_attention gaussian d=128, 2 keys, largest": _weighted("gaussian", 128, 2, join="max"),
    "weighted_attention gaussian d=64, not normalized": _weighted("gaussian", 64, 1, normalize=False),
    "weighted_attention gaussian d=128 float32": _weighted("gaussian", 128, 1, torch.float32),
    "chosen blocks d=64": partial(selected_case, 64),
    "chosen blocks d=128, documents": partial(selected_case, 128, packed=True),
    "chosen blocks d=128, 4 queries a key, by tile": partial(selected_case, 128, group=4, unit="tile"),
    "chosen blocks d=128, 4 landmarks, two levels": partial(
        selected_case, 128, landmarks=4, blocks_of_group=2
    ),
    "chosen blocks d=64 float32": partial(selected_case, 64, torch.float32),
}
"""Name -> a call of an op."""
