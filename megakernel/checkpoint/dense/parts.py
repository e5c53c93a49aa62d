"""Bit-exact mappings between a tensor of the model and the tensors of a Hugging Face checkpoint, both ways."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """One tensor of the model: one of the checkpoint's, or several of equal shape concatenated (SwiGLU's gate and up).

    hf_names: names in the Hugging Face checkpoint, in the order that `join` takes. transposed: the checkpoint stores
    matrices transposed.
    """

    hf_names: tuple[str, ...]
    transposed: bool = False

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The model's tensor from the checkpoint's; a single one is not copied."""
        oriented = [self._oriented(tensor) for tensor in tensors]
        return oriented[0] if len(oriented) == 1 else torch.cat(oriented)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The checkpoint's tensors from the model's; the inverse of `join`."""
        return [self._oriented(part) for part in tensor.chunk(len(self.hf_names))]

    def _oriented(self, tensor: Tensor) -> Tensor:
        return tensor.t() if self.transposed and tensor.dim() == 2 else tensor


@dataclass(frozen=True, kw_only=True)
class GroupedHeads(Part):
    """The QKV projection, whose rows we group by key head: [its queries | keys | value].

    hf_names: three tensors, or one with all queries first, then keys, then values.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    keys_per_head: int = 1
    """Keys per key head."""

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The model's tensor from the checkpoint's."""
        rows = tensors if len(tensors) == 3 else super().join(tensors).split(self._rows)
        return torch.cat([x.unflatten(0, (self.kv_heads, -1)) for x in rows], 1).flatten(0, 1)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The checkpoint's tensors from the model's; the inverse of `join`."""
        sizes = [rows // self.kv_heads for rows in self._rows]
        rows = [x.flatten(0, 1) for x in tensor.unflatten(0, (self.kv_heads, -1)).split(sizes, 1)]
        return rows if len(self.hf_names) == 3 else super().split(torch.cat(rows))

    @property
    def _rows(self) -> list[int]:
        keys = self.keys_per_head * self.kv_heads
        return [heads * self.head_dim for heads in (self.query_heads, keys, self.kv_heads)]
