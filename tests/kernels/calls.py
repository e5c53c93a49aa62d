"""Calls that launch every kernel, with two sequences, and two key heads with two query heads each."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megakernel.attention import Rotary
from megakernel.ops.feature_maps import start_state
from megakernel.ops.flurka_attention import flurka_attention
from megakernel.ops.flurka_attention.options import FlurkaState
from megakernel.ops.kernel_attention import kernel_attention
from megakernel.ops.selected_attention import selected_attention
from megakernel.ops.short_convolution import short_convolution
from megakernel.ops.state import KernelState
from megakernel.ops.weighted_attention import weighted_attention
from megakernel.ops.window import empty_tail

BATCH, QUERY_HEADS, HEADS, LENGTH, WIDTH = 2, 4, 2, 8192, 16


def tokens(heads: int, *lead: int, length: int = LENGTH) -> Tensor:
    return torch.empty(BATCH, heads, *lead, length, WIDTH, dtype=torch.bfloat16, requires_grad=True)


def parameter(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True)


def kernel(feature_map: str, keys: int = 0, **options) -> Tensor:
    if feature_map != "elu":
        options["projection"] = parameter(HEADS, WIDTH, WIDTH)
    if keys:
        options["priors"] = parameter(HEADS, keys)
    k = tokens(HEADS, *[keys] * (keys > 0))
    return kernel_attention(
        tokens(QUERY_HEADS), k, tokens(HEADS), feature_map=feature_map, backend="triton", **options
    )


@torch.no_grad()
def one_token(feature_map: str) -> None:
    """A decoding step of kernel attention, and one of FLuRKA."""
    q, k = (tokens(heads, length=1) for heads in (QUERY_HEADS, HEADS))
    projection = parameter(HEADS, WIDTH, WIDTH)
    state = start_state(feature_map, k, projection, WIDTH)
    options = {"feature_map": feature_map, "projection": projection, "backend": "triton"}
    kernel_attention(q, k, k, initial_state=state, **options)
    pools = {name: parameter(HEADS, 4, 32) for name in ("pool_keys", "pool_values")}
    positions = torch.zeros(BATCH, 1, dtype=torch.int64)
    entering = FlurkaState(state, empty_tail(k, k, 32))
    flurka_attention(
        q, k, k, initial_state=entering, positions=positions, rotary=Rotary(WIDTH), **pools, **options
    )


def flurka(feature_map: str, near: str, backend: str = "triton", **options) -> Tensor:
    pools = {name: parameter(HEADS, 4, 32) for name in ("pool_keys", "pool_values")}
    if near == "softmax":
        options = {"gate": parameter(BATCH, QUERY_HEADS, LENGTH), **options}
    if feature_map != "elu":
        options["projection"] = parameter(HEADS, WIDTH, WIDTH)
    q, k, v = tokens(QUERY_HEADS), tokens(HEADS), tokens(HEADS)
    return flurka_attention(q, k, v, feature_map=feature_map, near=near, **pools, backend=backend, **options)[
        0
    ]


def weighted(similarity: str) -> Tensor:
    q, k, v = tokens(QUERY_HEADS), tokens(HEADS, 2), tokens(HEADS)
    key_weights = parameter(1, HEADS, 2, 1)
    return weighted_attention(q, k, v, similarity=similarity, key_weights=key_weights, backend="triton")[0]


def selected(size: int, group: int | None = None) -> Tensor:
    pool = torch.full((1, size), 1 / size)
    options = {"pool": pool, "selected": 2, "group": group, "positions": documents(), "backend": "triton"}
    return selected_attention(tokens(QUERY_HEADS), tokens(HEADS), tokens(HEADS), **options)[0]


def convolution() -> Tensor:
    x, weight = tokens(HEADS, 3), parameter(HEADS, 3, WIDTH, 4)
    before = torch.zeros(BATCH, HEADS, 3, 3, WIDTH, dtype=x.dtype)
    return short_convolution(x, weight, before, documents(), backend="triton")


def documents() -> Tensor:
    return torch.arange(LENGTH).expand(BATCH, -1) % 100


class Handed:
    """An exchange that returns to a shard the state that it adds."""

    def __init__(self, own: KernelState, carries: Tensor):
        self.own = own

    def wait(self) -> KernelState:
        return self.own


FORWARD: dict[str, Callable[[], Tensor]] = {
    "kernel_attention elu": partial(kernel, "elu"),
    "kernel_attention favor, documents": lambda: kernel("favor", positions=documents()),
    "kernel_attention favor, bidirectional": partial(kernel, "favor", causal=False),
    "kernel_attention hedgehog, 2 keys": partial(kernel, "hedgehog", 2),
    "short convolution, documents": convolution,
    "FLuRKA elu": partial(flurka, "elu", "softmax"),
    "FLuRKA favor, 2 blocks, documents": lambda: flurka("favor", "softmax", blocks=2, positions=documents()),
    "FLuRKA hedgehog, kernel window": partial(flurka, "hedgehog", "kernel"),
    "FLuRKA hedgehog, composed": partial(flurka, "hedgehog", "softmax", "composed"),
    "FLuRKA favor, one normalizer, documents, composed": lambda: flurka(
        "favor", "softmax", "composed", gate=None, positions=documents()
    ),
    "weighted_attention gaussian": partial(weighted, "gaussian"),
    "chosen blocks, documents": partial(selected, 32),
    "chosen blocks, two levels, documents": partial(selected, 16, 2),
}
"""Name -> a call whose output has a gradient."""

EXCHANGED: dict[str, Callable[[], Tensor]] = {
    "kernel_attention favor": partial(kernel, "favor", positions=LENGTH, exchange=Handed),
    "FLuRKA hedgehog": partial(flurka, "hedgehog", "softmax", positions=LENGTH, exchange=Handed),
}
"""The same for shards: states are sliced out of padded buffers, so their gradients are padded."""
