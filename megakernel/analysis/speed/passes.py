"""What the launches of our kernels read, write and multiply, counted pass by pass.

A pass goes over all tokens once. It is as long as its bytes or its operations take, whichever is slower, and passes
follow each other. Left out is what does not grow with N times d: the states of segments, at most 2 % of q, k, v and
out.
"""

from typing import NamedTuple

from megakernel.config import Attention
from megakernel.config.compression import BlockCompression

from .cases import Case
from .cost import Cost, attention_of

CHUNK = 64
"""Tokens whose pairs a kernel weighs one by one, as `megakernel.ops.kernels.launch.tiles` has it for bfloat16."""

STATE_TILE = 128 * 128
"""Numbers of a state that one program holds, as there: larger states are cut along their values."""

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

    weights: float
    """Weights of the keys of a chunk or a window, or the gradient of a query or key through them."""

    weighing: float
    """Values weighed, or a product of gradients with values."""

    blocks: int
    """Programs side by side for the values of a state: each reads the queries and keys and maps them again."""

    learned: bool
    """Whether phi has a matrix with a gradient."""

    gated: bool
    """Whether a softmax window and a far part have a normalizer each, and a gate between them."""

    @property
    def carry(self) -> float:
        """The state taken past the token."""
        return self.pooling + self.blocks * self.key_map + self.write

    @property
    def gradients(self) -> int:
        """Vectors written for the gradient of a query or key, and of the argument of its learned map."""
        return (1 if self.blocks == 1 else 2 * self.blocks) * (2 if self.learned else 1)

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
    products = _products(form, size)
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


def _products(form: Attention, size: int) -> _Products:
    phi, compression, near = form.feature_map, form.compression, form.near
    assert phi is not None
    learned = phi.name == "hedgehog"
    features = phi.width(size)
    mapped = 2 * size * (size if learned else phi.frequencies(size))
    state = 2 * features * size
    blocks = -(-size * features // STATE_TILE)
    if compression is None:
        weights, weighing = 2 * CHUNK * features, 2 * CHUNK * size
        return _Products(mapped, mapped, 0, state, state, weights, weighing, blocks, learned, gated=False)
    assert isinstance(compression, BlockCompression)
    assert near is not None
    share, window = compression.rank / compression.block_size, 2 * compression.block_size
    return _Products(
        query_map=mapped,
        key_map=share * mapped,
        pooling=2 * compression.rank * 2 * size,
        write=share * state,
        read=state,
        # A window of softmax weighs with keys of d numbers, not with features.
        weights=window * (size if near.kind == "softmax" else features),
        weighing=window * size,
        blocks=blocks,
        learned=learned,
        gated=near.kind == "softmax" and near.join == "gated",
    )


def _forward(of: _Products) -> list[_Work]:
    pairs = of.blocks * of.weights + of.weighing
    queries = of.blocks * of.query_map + of.read
    return [
        _Work("states: k, v", of.blocks + 1, 0, of.carry),
        _Work("outputs: q, k, v -> out", 2 * of.blocks + 2, of.numbers, queries + pairs + of.carry),
    ]


def _backward(of: _Products) -> list[_Work]:
    # The pull of a query, phi(q) g^T, is added to the gradient of the state before the keys meet it.
    pull = of.blocks * of.query_map + of.read
    # Pairs: g.u and dq; under a softmax their weights as well.
    pairs = of.blocks * of.weights * (2 if of.gated else 1) + of.weighing
    queries = pairs + 2 * of.blocks * of.query_map + of.read + of.carry
    # Pairs: weights, g.u, dk and dv. Keys, or landmarks and through them keys, meet the gradient of the state twice.
    pairs = 2 * of.blocks * of.weights + 2 * of.weighing
    keys = pull + pairs + 2 * of.write + 2 * of.blocks * of.key_map + 2 * of.pooling
    reads = 2 * of.blocks + 2
    work = [
        _Work("pulls: q, do, out -> do.o", of.blocks + 2, of.numbers + 1, pull),
        _Work("dq: q, k, v, do -> dq", reads + of.gradients, of.numbers + 1 + of.gated, queries),
        _Work("dk, dv: q, k, v, do -> dk, dv", reads + of.gradients + 1, of.numbers + 1, keys),
    ]
    if of.blocks > 1:
        work.append(_Work("sums over blocks", 2 * of.gradients + (4 if of.learned else 2), 0, 0))
    if of.learned:
        work.append(_Work("dW: gradients of the map's arguments, q, k", 4, 0, of.query_map + of.key_map))
    return work
