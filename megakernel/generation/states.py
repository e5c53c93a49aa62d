"""Recurrent states as rows of one batch: they join and leave. All their tensors have rows first."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from megakernel.ops.softmax_attention import SoftmaxState
from megakernel.ops.weighted_attention import WeightedState

_GROWING = (SoftmaxState, WeightedState)
"""States with a key and a value for each token. A position says how many of the last ones a query sees, so that rows of
other lengths lie side by side behind padding in front, which nothing sees."""


class Apart(ValueError):
    """States that no batch holds together: of mechanisms whose state grows in another way than keys and values do."""


def join(a: Any, b: Any) -> Any:
    """The rows of `a`, then those of `b`; Apart where their other dimensions differ."""
    try:
        return pytree.tree_map(_joined, a, b, is_leaf=_grows)
    except ValueError:  # of trees that are not alike, too
        raise Apart from None


def _joined(a: Any, b: Any) -> Any:
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape[1:] == b.shape[1:]:
        return torch.cat([a, b])
    if isinstance(a, _GROWING) and isinstance(b, _GROWING):
        length = max(a.keys.shape[-2], b.keys.shape[-2])
        return type(a)(*(torch.cat([_padded(x, length), _padded(y, length)]) for x, y in zip(a, b)))
    if a is None and b is None:
        return None
    raise Apart


def rows(tree: Any, chosen: Sequence[int], longest: int) -> Any:
    """Some rows; longest: tokens of the longest text among them, beyond which keys are padding."""

    def of(x: Any) -> Any:
        if isinstance(x, _GROWING):
            return type(x)(*(part[list(chosen), ..., -longest:, :] for part in x))
        return x[list(chosen)] if isinstance(x, Tensor) else x

    return pytree.tree_map(of, tree, is_leaf=_grows)


def named(tree: Any) -> Iterator[tuple[str, Tensor]]:
    """All tensors, with the way to each: `3.inner.sums` of the fourth layer."""
    for path, x in pytree.tree_leaves_with_path(tree):
        if isinstance(x, Tensor):
            yield _name(path), x


def filled(like: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree that `named` was given, from its tensors and a tree that is like it; KeyError where one is missing."""
    return pytree.tree_map_with_path(
        lambda path, x: tensors[_name(path)] if isinstance(x, Tensor) else x, like
    )


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(str(key.name if isinstance(key, pytree.GetAttrKey) else key.idx) for key in path)


def _grows(tree: Any) -> bool:
    return isinstance(tree, _GROWING)


def _padded(x: Tensor, length: int) -> Tensor:
    return F.pad(x, (0, 0, length - x.shape[-2], 0))
