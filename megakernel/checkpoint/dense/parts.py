"""How a tensor of the model is made of those of a Hugging Face checkpoint, and those of it, bit for bit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Part(Protocol):
    """One tensor of the model."""

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Names in the Hugging Face checkpoint, in the order in which `join` takes them."""
        ...

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The checkpoint's tensors -> the model's."""
        ...

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The model's tensor -> the checkpoint's; the inverse of `join`."""
        ...


def _turned(tensor: Tensor, transposed: bool) -> Tensor:
    return tensor.t() if transposed and tensor.dim() == 2 else tensor


@dataclass(frozen=True)
class Same:
    """The same tensor, with the dimensions of a matrix exchanged where they keep it the other way round."""

    hf_names: tuple[str, ...]
    transposed: bool = False

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """See Part."""
        return _turned(tensors[0], self.transposed)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """See Part."""
        return [_turned(tensor, self.transposed)]


@dataclass(frozen=True)
class Stacked:
    """Equal tensors one below the other: the gate and up rows of SwiGLU."""

    hf_names: tuple[str, ...]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """See Part."""
        return torch.cat(list(tensors))

    def split(self, tensor: Tensor) -> list[Tensor]:
        """See Part."""
        return list(tensor.chunk(len(self.hf_names)))


@dataclass(frozen=True)
class GroupedHeads:
    """Rows of queries, keys and values, which we keep by key head: [its queries | keys | value].

    hf_names: three tensors; or one with all queries first, then keys, then values.
    """

    hf_names: tuple[str, ...]
    query_heads: int
    kv_heads: int
    head_dim: int
    transposed: bool = False

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """See Part."""
        if len(tensors) == 1:
            tensors = _turned(tensors[0], self.transposed).split(self._rows)
        groups = [x.unflatten(0, (self.kv_heads, -1)) for x in tensors]
        return torch.cat(groups, 1).flatten(0, 1)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """See Part."""
        sizes = [rows // self.kv_heads for rows in self._rows]
        parts = [x.flatten(0, 1) for x in tensor.unflatten(0, (self.kv_heads, -1)).split(sizes, 1)]
        if len(self.hf_names) == 3:
            return parts
        return [_turned(torch.cat(parts), self.transposed)]

    @property
    def _rows(self) -> list[int]:
        return [heads * self.head_dim for heads in (self.query_heads, self.kv_heads, self.kv_heads)]
