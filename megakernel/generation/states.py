"""Batching of recurrent states: concatenating, selecting and naming rows. All state tensors have batch size first."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from megakernel.ops.softmax_attention import SoftmaxState
from megakernel.ops.weighted_attention import WeightedState

if TYPE_CHECKING:
    from megakernel.model import LanguageModel

_GROWING = (SoftmaxState, WeightedState)
"""States with a key and a value per token. A query's position says how many of the last ones it sees, so rows of
different lengths are left-padded with keys that no query sees."""


class NotBatchableError(ValueError):
    """States that cannot be batched: of mechanisms whose states grow other than by a key and value per token."""


def concatenate(a: Any, b: Any) -> Any:
    """The rows of `a`, then those of `b`. Raises NotBatchableError if their other dimensions differ."""
    try:
        return pytree.tree_map(_concatenate, a, b, is_leaf=_is_growing)
    except ValueError:  # pytree's error for different structures, or that of a leaf
        raise NotBatchableError from None


def _concatenate(a: Any, b: Any) -> Any:
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape[1:] == b.shape[1:]:
        return torch.cat([a, b])
    if isinstance(a, _GROWING) and isinstance(b, _GROWING):
        length = max(a.keys.shape[-2], b.keys.shape[-2])
        return type(a)(*(torch.cat([_left_pad(x, length), _left_pad(y, length)]) for x, y in zip(a, b)))
    if a is None and b is None:
        return None
    raise NotBatchableError


def select_rows(tree: Any, chosen: Sequence[int], longest: int) -> Any:
    """The chosen rows; longest: tokens of the longest of these texts, to which keys and values are trimmed."""

    def of(x: Any) -> Any:
        if isinstance(x, _GROWING):
            return type(x)(*(part[list(chosen), ..., -longest:, :] for part in x))
        return x[list(chosen)] if isinstance(x, Tensor) else x

    return pytree.tree_map(of, tree, is_leaf=_is_growing)


def on_device(tree: Any, device: torch.device | str) -> Any:
    """The tree with its tensors on a device."""
    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, tree)


def named_tensors(tree: Any) -> Iterator[tuple[str, Tensor]]:
    """All tensors with their paths: `3.inner.sums` of the fourth layer."""
    for path, x in pytree.tree_leaves_with_path(tree):
        if isinstance(x, Tensor):
            yield _name(path), x


def state_bytes(tree: Any) -> int:
    """Bytes of all tensors."""
    return sum(x.nbytes for _, x in named_tensors(tree))


def softmax_bytes_per_token(model: "LanguageModel") -> int:
    """Bytes that each token adds to the key-value cache of this model with softmax over all tokens in every layer."""
    sizes = model.settings.model
    return sizes.num_layers * sizes.kv_heads * sizes.head_size * 2 * model.output_matrix.element_size()


def with_tensors(like: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `named_tensors`: a tree like `like` with these tensors. Raises KeyError for a missing one."""
    return pytree.tree_map_with_path(
        lambda path, x: tensors[_name(path)] if isinstance(x, Tensor) else x, like
    )


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(str(key.name if isinstance(key, pytree.GetAttrKey) else key.idx) for key in path)


def _is_growing(tree: Any) -> bool:
    return isinstance(tree, _GROWING)


def _left_pad(x: Tensor, length: int) -> Tensor:
    return F.pad(x, (0, 0, length - x.shape[-2], 0))
