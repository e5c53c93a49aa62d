"""What the launches of our kernels read, write and multiply, counted pass by pass.

A pass goes over all tokens once. It is as long as its bytes or its operations take, whichever is slower, and passes
follow each other. Programs hold what `megakernel.ops.kernels.launch.TILES` says; FLuRKA is still counted as if its
passes were those of kernel attention, not those of its own kernels (`flurka_attention.launches`). Left out is what does
not grow with N times d: the states of segments, at most 2 % of q, k, v and out.

Programs for the columns of one segment's values stand beside each other in a launch (`states.share_of_program`) and
read the same queries and keys. Assumed here, and not measured: they run at the same time and pace, so that these come
from memory once and reach the other programs from the cache. What they map and multiply is counted in each of them.
"""

from typing import NamedTuple

from megakernel.config import Attention
from megakernel.config.compression import BlockCompression
from megakernel.ops.kernels.features import padded
from megakernel.ops.kernels.launch import Tiles

from .cases import Case
from .cost import Cost, attention_of

FLOAT32 = 4
"""Bytes."""


class Pass(NamedTuple):
    """One launch over all tokens."""

    name: str
    cost: Cost


class _Work(NamedTuple):
    """A pass for one token of one head."""

    name: str

    vectors: int
    """Of d numbers, read and written; a vector of float32 is two."""

    numbers: int
    """Of float32 beside them."""

    flops: float


class _Products(NamedTuple):
    """FLOPs of the parts, for one token of one head."""

    query_map: float
    """phi of a query; its gradient as well."""

    key_map: float
    """phi of a key, or of the token's share of the landmarks."""

    pooling: float
    """The token's part in the landmarks of its block."""

    write: float
    """A key, or its share of the landmarks, added to the state."""

    read: float
    """A query's product with the state; as much as adding a query to the gradient of the state."""

    weight: float
    """The weight of one key, or its share in the gradient of a query or key."""

    weighing: float
    """One value weighed, or its product with a gradient."""

    window: int | None
    """Keys that a query weighs one by one; None: those of the kernel's chunk."""

    tiles: Tiles
    """What programs of each kernel hold."""

    learned: bool
    """Whether phi has a matrix with a gradient."""

    gated: bool
    """Whether a softmax window and a far part have a normalizer each, and a gate between them."""

    def blocks(self, kernel: str) -> int:
        """Programs side by side for the values of a state: each maps the queries and keys again."""
        return self.tiles.blocks(kernel)

    def carry(self, kernel: str) -> float:
        """The state taken past the token."""
        return self.pooling + self.blocks(kernel) * self.key_map + self.write

    def weights(self, kernel: str) -> float:
        """Weights of all keys that a query meets one by one, in every block."""
        return self.blocks(kernel) * self.met(kernel) * self.weight

    def weighed(self, kernel: str) -> float:
        """Their values, weighed."""
        return self.met(kernel) * self.weighing

    def met(self, kernel: str) -> int:
        """Keys that a query meets one by one."""
        return self.window or self.tiles.of(kernel).chunk

    def gradients(self, kernel: str) -> int:
        """Vectors written for the gradient of a query or key, and of the argument of its learned map."""
        blocks = self.blocks(kernel)
        return (1 if blocks == 1 else 2 * blocks) * (2 if self.learned else 1)

    @property
    def numbers(self) -> int:
        """Normalizers and the logit of a gate."""
        return 3 if self.gated else 1


def launched(preset: str, case: Case, element: int, backward: bool) -> list[Pass] | None:
    """The passes of causal kernel attention or FLuRKA; None for a mechanism whose kernels are not counted.

    element: bytes of a number of q, k and v.
    """
    form = attention_of(preset, case)
    if case.is_layer or form.feature_map is None:
        return None
    rows, size = case.all_tokens * case.heads, case.head_dim
    products = _products(form, size, element)
    work = _forward(products)
    if backward:
        work += _backward(products)
    return [
        Pass(
            one.name,
            Cost(rows * (one.vectors * size * element + one.numbers * FLOAT32), rows * one.flops),
        )
        for one in work
    ]


def _products(form: Attention, size: int, element: int) -> _Products:
    phi, compression, near = form.feature_map, form.compression, form.near
    assert phi is not None
    learned = phi.name == "hedgehog"
    features = phi.width(size)
    mapped = 2 * size * (size if learned else phi.frequencies(size))
    state = 2 * features * size
    tiles = Tiles(0, 0, padded(features), padded(size), element)
    if compression is None:
        return _Products(
            mapped, mapped, 0, state, state, 2 * features, 2 * size, None, tiles, learned, gated=False
        )
    assert isinstance(compression, BlockCompression)
    assert near is not None
    share = compression.rank / compression.block_size
    return _Products(
        query_map=mapped,
        key_map=share * mapped,
        pooling=2 * compression.rank * 2 * size,
        write=share * state,
        read=state,
        # A window of softmax weighs with keys of d numbers, not with features.
        weight=2 * (size if near.kind == "softmax" else features),
        weighing=2 * size,
        window=compression.block_size,
        tiles=tiles,
        learned=learned,
        gated=near.kind == "softmax" and near.join == "gated",
    )


def _forward(of: _Products) -> list[_Work]:
    blocks = of.blocks("read")
    queries = blocks * of.query_map + of.read + of.weights("read") + of.weighed("read")
    return [
        _Work("states: k, v", 2, 0, of.carry("write_keys")),
        _Work("outputs: q, k, v -> out", 4, of.numbers, queries + of.carry("read")),
    ]


def _backward(of: _Products) -> list[_Work]:
    work = [_of_queries(of), _pulls(of), _of_values(of), _of_keys(of)]
    cut = [of.gradients(name) for name in ("pull_queries", "pull_keys") if of.blocks(name) > 1]
    if cut:
        work.append(_Work("sums over blocks", sum(cut) + len(cut) * (2 if of.learned else 1), 0, 0))
    if of.learned:
        work.append(_Work("dW: gradients of the map's arguments, q, k", 4, 0, of.query_map + of.key_map))
    return work


def _pulls(of: _Products) -> _Work:
    # phi(q) g^T is added to the gradient of the state before the keys meet it.
    work = of.blocks("write_queries") * of.query_map + of.read
    return _Work("pulls: q, do", 2, of.numbers + 1, work)


def _of_queries(of: _Products) -> _Work:
    # Pairs: g.u, dq, and the weights of a softmax or, once do.o is exact, the sum of the keys that it was off by.
    kernel = "pull_queries"
    blocks = of.blocks(kernel)
    pairs = of.weights(kernel) * 2 + of.weighed(kernel)
    work = pairs + 2 * blocks * of.query_map + of.read + of.carry(kernel)
    vectors = 5 + of.gradients(kernel)
    return _Work("dq: q, k, v, do, out -> dq, do.o", vectors, of.numbers + 1 + of.gated, work)


def _of_values(of: _Products) -> _Work:
    # Pairs: weights and dv. Keys, or landmarks and through them keys, meet the gradient of the state.
    kernel = "pull_values"
    blocks = of.blocks(kernel)
    maps = blocks * (of.query_map + of.key_map) + of.pooling
    work = maps + of.read + of.write + of.weights(kernel) + of.weighed(kernel)
    return _Work("dv: q, k, do -> dv", 4, of.numbers + 1, work)


def _of_keys(of: _Products) -> _Work:
    # Pairs: g.u and dk; under a softmax their weights as well.
    kernel = "pull_keys"
    blocks = of.blocks(kernel)
    maps = blocks * (of.query_map + 2 * of.key_map) + of.pooling
    pairs = of.weights(kernel) * (2 if of.gated else 1) + of.weighed(kernel)
    vectors = 4 + of.gradients(kernel)
    return _Work("dk: q, k, v, do -> dk", vectors, of.numbers + 1, maps + of.read + of.write + pairs)
