"""Recurrent states as rows of one batch: they join and leave. All their tensors have rows first."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.softmax_attention import SoftmaxState
from megakernel.ops.weighted_attention import WeightedState

_GROWING = (SoftmaxState, WeightedState)
"""States with a key and a value for each token. A position says how many of the last ones a query sees, so that rows of
other lengths lie side by side behind padding in front, which nothing sees."""


class Apart(ValueError):
    """States that no batch holds together: of mechanisms whose state grows in another way than keys and values do."""


def join(a: Any, b: Any) -> Any:
    """The rows of `a`, then those of `b`; Apart where their other dimensions differ."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape[1:] != b.shape[1:]:
            raise Apart
        return torch.cat([a, b])
    if isinstance(a, _GROWING) and isinstance(b, _GROWING):
        length = max(a.keys.shape[-2], b.keys.shape[-2])
        return type(a)(*(torch.cat([_padded(x, length), _padded(y, length)]) for x, y in zip(a, b)))
    if isinstance(a, tuple | list) and type(a) is type(b):
        return _made(a, [join(x, y) for x, y in zip(a, b, strict=True)])
    if a is None and b is None:
        return None
    raise Apart


def rows(tree: Any, chosen: Sequence[int], longest: int) -> Any:
    """Some rows; longest: tokens of the longest text among them, beyond which keys are padding."""
    if isinstance(tree, Tensor):
        return tree[list(chosen)]
    if isinstance(tree, _GROWING):
        return type(tree)(*(x[list(chosen), ..., -longest:, :] for x in tree))
    if isinstance(tree, tuple | list):
        return _made(tree, [rows(x, chosen, longest) for x in tree])
    return tree


def named(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors, with the way to each: `3.inner.sums` of the fourth layer."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, tuple | list):
        for part, x in _parts(tree):
            yield from named(x, f"{name}.{part}" if name else part)


def filled(like: Any, tensors: Mapping[str, Tensor], name: str = "") -> Any:
    """The tree that `named` was given, from its tensors and a tree that is like it; KeyError where one is missing."""
    if isinstance(like, Tensor):
        return tensors[name]
    if isinstance(like, tuple | list):
        return _made(
            like, [filled(x, tensors, f"{name}.{part}" if name else part) for part, x in _parts(like)]
        )
    return like


def _parts(tree: tuple | list) -> Iterator[tuple[str, Any]]:
    return zip(map(str, getattr(tree, "_fields", range(len(tree)))), tree)


def _padded(x: Tensor, length: int) -> Tensor:
    return F.pad(x, (0, 0, length - x.shape[-2], 0))


def _made(like: tuple | list, parts: list[Any]) -> Any:
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)
