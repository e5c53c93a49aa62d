"""What the launches of our kernels read, write and multiply, counted from the launches themselves.

A call of the op on one head of TOKENS tokens is noted down instead of made, forward and backward. A launch goes over
all tokens once: it reads or writes each of its tensors, and multiplies what `products` says for its grid and tiles.
All of that grows with the tokens and with nothing else, so that it is scaled to the tokens and heads of a case. A pass
is as long as its bytes or its operations take, whichever is slower, and passes follow each other.

Left out are weights, what segments have one of (states are at most 2 % of q, k, v and out on long rows), and torch's
passes over single numbers of tokens.

Programs for the columns of one segment's values stand beside each other in a launch of kernel attention
(`states.share_of_program`) and read the same queries and keys; so do programs for the keys of neighbouring windows.
Assumed here, and not measured: they run at the same time and pace, so that these come from memory once and reach the
other programs from the cache. FLuRKA's programs for other columns stand on a second axis, behind those of all segments,
and read queries and keys from memory again. What programs map and multiply is counted in each of them.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.config import Attention
from megakernel.config.compression import BlockCompression
from megakernel.ops import flurka_attention, kernel_attention
from megakernel.ops.kernels.launch import Launch, noting

from .cases import Case
from .cost import Cost, attention_of
from .products import products

TOKENS = 4096
"""Of the row whose launches are noted down."""

DTYPES = {2: torch.bfloat16, 4: torch.float32}
"""Bytes of a number of q, k and v -> its dtype."""

NOT_OF_TOKENS = frozenset(
    ("matrix", "wide_matrix", "pool_keys", "pool_values", "sums", "norms", "logs", "dkeys", "dvalues")
)
"""Tensors of launches that do not grow with the tokens, or only with the number of segments."""

PARTS = frozenset(("dq", "dk", "dy", "drift", "along", "dmarks"))
"""Tensors of launches that have a part for each block of values, which torch adds up."""

OF_COLUMNS = frozenset(("v", "grad", "out", "marked", "dmarked"))
"""Tensors of which a program for some columns of values touches these columns alone."""

OF_FIRST = {
    "pool": {"features", "mark_logs"},
    "read": {"factor", "peak", "scale"},
    "pull_queries": {"near"},
}
"""Kernel -> what its programs for the first columns touch alone."""


class Pass(NamedTuple):
    """One launch over all tokens, or torch's work between them."""

    name: str
    cost: Cost


def launched(preset: str, case: Case, element: int, backward: bool) -> list[Pass] | None:
    """The passes of causal kernel attention or FLuRKA; None for a mechanism whose kernels are not counted.

    element: bytes of a number of q, k and v, 2 or 4.
    """
    if case.is_layer or not _is_counted(attention_of(preset, case)):
        return None
    forward, back = counted(preset, case.head_dim, element)
    scale = case.all_tokens * case.heads / TOKENS
    passes = forward + back if backward else forward
    return [Pass(one.name, Cost(scale * one.cost.bytes, scale * one.cost.flops)) for one in passes]


@cache
def counted(preset: str, head_dim: int, element: int, tokens: int = TOKENS) -> tuple[list[Pass], list[Pass]]:
    """The passes of forward and of backward for one row of one head."""
    form = attention_of(preset, Case(1, tokens, 1, head_dim))
    with noting() as launches:
        out = _call(form, tokens, head_dim, DTYPES[element])
        ahead = len(launches)
        out.backward(torch.empty_like(out))
    back = launches[ahead:]
    return _passes(launches[:ahead]), [*_passes(back), *_between(back, element)]


def _is_counted(form: Attention) -> bool:
    of_blocks = form.compression is None or isinstance(form.compression, BlockCompression)
    return form.feature_map is not None and form.mixture is None and of_blocks


def _call(form: Attention, tokens: int, size: int, dtype: torch.dtype) -> Tensor:
    """The output of the form's op, with everything in need of a gradient that has one in training."""
    phi, compression, near = form.feature_map, form.compression, form.near
    assert phi is not None
    q, k, v = (torch.empty(1, 1, tokens, size, dtype=dtype, requires_grad=True) for _ in range(3))
    learned, rows = phi.name == "hedgehog", phi.frequencies(size)
    projection = torch.empty(1, size if learned else rows, size) if learned or rows else None
    if learned and projection is not None:
        projection.requires_grad_()
    if compression is None:
        out = kernel_attention(q, k, v, feature_map=phi.name, projection=projection, backend="triton")
        assert isinstance(out, Tensor)
        return out
    assert isinstance(compression, BlockCompression)
    assert near is not None
    pools = [torch.empty(compression.rank, compression.block_size, requires_grad=True) for _ in range(2)]
    gated = near.kind == "softmax" and near.join == "gated"
    return flurka_attention(
        q,
        k,
        v,
        feature_map=phi.name,
        projection=projection,
        pool_keys=pools[0],
        pool_values=pools[1],
        near=near.kind,
        blocks=near.blocks,
        gate=torch.empty(1, 1, tokens, requires_grad=True) if gated else None,
        backend="triton",
    )[0]


def _passes(launches: list[Launch]) -> list[Pass]:
    # States pass from segment to segment in a launch that no token enters.
    tokens = [one for one in launches if one.kernel.__name__ != "pass_states"]
    return [Pass(one.kernel.__name__, Cost(_moved(one), products(one))) for one in tokens]


def _tensors(launch: Launch) -> dict[str, Tensor]:
    """The tensors of tokens and landmarks by name; where one stands in for another, the first one alone."""
    named = zip(launch.kernel.arg_names, launch.arguments)
    found: dict[int, tuple[str, Tensor]] = {}
    for name, x in named:
        # Numbers of heads are vectors.
        if isinstance(x, Tensor) and x.numel() and x.dim() > 1 and name not in NOT_OF_TOKENS:
            found.setdefault(x.data_ptr(), (name, x))
    return dict(found.values())


def _moved(launch: Launch) -> int:
    tensors = _tensors(launch)
    # A part more than there are blocks of values is from an earlier launch.
    blocks = launch.options["VP"] // launch.options.get("BV", launch.options["VP"])
    moved = sum((x[:blocks] if name in PARTS else x).nbytes for name, x in tensors.items())
    if len(launch.grid) > 1:
        once = PARTS | OF_COLUMNS | OF_FIRST.get(launch.kernel.__name__, set())
        moved += (blocks - 1) * sum(x.nbytes for name, x in tensors.items() if name not in once)
    # Gradients that are added to those of an earlier launch are read as well.
    more = [name for flag, name in (("MORE", "dq"), ("MORE_PROJECTED", "dy")) if launch.options.get(flag)]
    return moved + sum(tensors[name].nbytes for name in more if name in tensors)


def _between(launches: list[Launch], element: int) -> list[Pass]:
    """Torch's passes of backward: sums over parts, and a learned projection's gradient from that of its products."""
    sums, of_matrix, flops = 0, 0, 0
    of_tokens = {"pull_queries": "q", "pull_keys": "k", "pull_landmarks": "marks"}
    for launch in launches:
        tensors, name = _tensors(launch), launch.kernel.__name__
        # Gradients of tokens go back to their dtype, those of landmarks and numbers stay float32.
        width = 4 if name == "pull_landmarks" else element
        for part in PARTS & tensors.keys():
            x = tensors[part]
            if len(x) > 1:
                size = width if part in ("dq", "dk", "dy") else 4
                sums += x.nbytes + x[0].numel() * size
        if name in of_tokens and launch.options.get("LEARNED") and "dy" in tensors:
            tokens = tensors[of_tokens[name]]
            rows, features = tokens.numel() // tokens.shape[-1], tensors["dy"].shape[-1]
            of_matrix += rows * features * width + tokens.nbytes
            flops += 2 * rows * features * tokens.shape[-1]
    found = [Pass("sums over blocks of values", Cost(sums, 0))] if sums else []
    return found + ([Pass("gradient of the projection", Cost(of_matrix, flops))] if flops else [])
