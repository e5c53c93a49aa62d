"""How a tensor of the model is made of those of a Hugging Face checkpoint, and those of it, bit for bit."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """One tensor of the model: the checkpoint's, or equal ones below each other, as the gate and up rows of SwiGLU.

    hf_names: names in the Hugging Face checkpoint, in the order in which `join` takes them. transposed: the checkpoint
    keeps matrices the other way round.
    """

    hf_names: tuple[str, ...]
    transposed: bool = False

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The checkpoint's tensors -> the model's; a single one is not copied."""
        turned = [self._turned(tensor) for tensor in tensors]
        return turned[0] if len(turned) == 1 else torch.cat(turned)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The model's tensor -> the checkpoint's; the inverse of `join`."""
        return [self._turned(part) for part in tensor.chunk(len(self.hf_names))]

    def _turned(self, tensor: Tensor) -> Tensor:
        return tensor.t() if self.transposed and tensor.dim() == 2 else tensor


@dataclass(frozen=True, kw_only=True)
class GroupedHeads(Part):
    """Rows of queries, keys and values, which we keep by key head: [its queries | keys | value].

    hf_names: three tensors; or one with all queries first, then keys, then values.
    """

    query_heads: int
    kv_heads: int
    head_dim: int

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The checkpoint's tensors -> the model's."""
        rows = tensors if len(tensors) == 3 else super().join(tensors).split(self._rows)
        return torch.cat([x.unflatten(0, (self.kv_heads, -1)) for x in rows], 1).flatten(0, 1)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The model's tensor -> the checkpoint's; the inverse of `join`."""
        sizes = [rows // self.kv_heads for rows in self._rows]
        rows = [x.flatten(0, 1) for x in tensor.unflatten(0, (self.kv_heads, -1)).split(sizes, 1)]
        return rows if len(self.hf_names) == 3 else super().split(torch.cat(rows))

    @property
    def _rows(self) -> list[int]:
        return [heads * self.head_dim for heads in (self.query_heads, self.kv_heads, self.kv_heads)]
