"""Context parallelism inside one process: one thread per shard, which pass tensors to each other directly.

The shards share one autograd graph, so a backward through all outputs also tests the gradients of the exchanges.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from megakernel.attention import AttentionLayer, Rotary
from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.sequence import ContextParallelShard
from megakernel.ops.state import KernelState, empty_state, keep, merge
from tests.unit.attention.mechanisms import assert_close, gradients

Item = TypeVar("Item")


class Table:
    """Exchanges items between the threads."""

    def __init__(self, size: int):
        self.size = size
        self.barrier = threading.Barrier(size)
        self.slots: list = [None] * size

    def gather(self, rank: int, item: Item) -> list[Item]:
        self.slots[rank] = item
        self.barrier.wait()
        items = list(self.slots)
        self.barrier.wait()
        return items


class FinishedExchange(NamedTuple, Generic[Item]):
    """A finished exchange."""

    result: Item

    def wait(self) -> Item:
        return self.result


class ThreadShard(ContextParallelShard):
    """A context-parallel shard whose ranks are threads."""

    def __init__(self, table: Table, rank: int):
        self.table, self.rank, self.size = table, rank, table.size

    def previous_tokens(self, x: Tensor, count: int) -> Tensor:
        shards = self.table.gather(self.rank, x)
        if self.rank == 0:
            return x.new_zeros(*x.shape[:-2], count, x.shape[-1])
        return shards[self.rank - 1][..., -count:, :]

    def start_prefix(self, state: KernelState, carries: Tensor) -> FinishedExchange[KernelState]:
        return self._merged(self.table.gather(self.rank, (state, carries))[: self.rank], state)

    def start_suffix(self, state: KernelState, carries: Tensor) -> FinishedExchange[KernelState]:
        return self._merged(self.table.gather(self.rank, (state, carries))[: self.rank : -1], state)

    def _merged(
        self, parts: list[tuple[KernelState, Tensor]], state: KernelState
    ) -> FinishedExchange[KernelState]:
        return FinishedExchange(
            reduce(lambda total, part: merge(keep(total, part[1]), part[0]), parts, empty_state(state))
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self.table.gather(self.rank, x)).sum(0)

    def all_tokens(self, x: Tensor) -> Tensor:
        return torch.cat(self.table.gather(self.rank, x), -2)

    def tokens_to_heads(self, x: Tensor) -> Tensor:
        return torch.cat(self.table.gather(self.rank, x), 2).chunk(self.size, 1)[self.rank]

    def heads_to_tokens(self, x: Tensor) -> Tensor:
        return torch.cat(self.table.gather(self.rank, x), 1).chunk(self.size, 2)[self.rank]

    def start_rotation(self, tensors: tuple[Tensor, ...]) -> FinishedExchange[tuple[Tensor, ...]]:
        return FinishedExchange(self.table.gather(self.rank, tensors)[self.rank - 1])


def in_shards(size: int, work: Callable[[ThreadShard], Tensor]) -> list[Tensor]:
    """The result of `work` on every shard."""
    table = Table(size)

    def guarded(rank: int) -> Tensor:
        try:
            return work(ThreadShard(table, rank))
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, range(size)))


def assert_same_with_gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Check that two float64 outputs and their gradients, none of which is all zero, are the same."""
    found, expected = ((out, *torch.autograd.grad(out.sin().sum(), leaves)) for out in outputs)
    for actual, wanted in zip(found, expected):
        assert wanted.any()
        torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-9)


def check_shards(
    module: AttentionLayer,
    inputs: tuple[Tensor, Tensor, Tensor],
    size: int,
    positions: Tensor | None,
    rotary: Rotary,
    *,
    differentiate: bool = True,
) -> None:
    """Check that a layer over `size` shards of q, k, v has the outputs and gradients of the unsharded layer.

    differentiate: False for a layer that rotates tensors: all shards have one backward here, which cannot wait for
    itself.
    """
    expected = module(*inputs, AttentionInputs(positions=positions, rotary=rotary))

    def work(cp_shard: ThreadShard) -> Tensor:
        local_inputs = [x.chunk(size, 2)[cp_shard.rank] for x in inputs]
        local_positions = None if positions is None else positions.chunk(size, 1)[cp_shard.rank]
        return module(
            *local_inputs, AttentionInputs(positions=local_positions, rotary=rotary, cp_shard=cp_shard)
        )

    out = torch.cat(in_shards(size, work), 2)
    assert_close(out, expected)
    if not differentiate:
        return
    for actual, wanted in zip(gradients(module, out, *inputs), gradients(module, expected, *inputs)):
        assert_close(actual, wanted)


def check_shards_and_decoding(
    module: AttentionLayer,
    whole: Tensor,
    tensors: Sequence[Tensor],
    positions: Tensor | None,
    rotary: Rotary,
    size: int,
    prompt: Sequence[int],
) -> None:
    """Check that a float64 layer gives the output `whole` over `size` shards, and when decoding.

    tensors: q, k, v and the further projection, if the layer takes one; gradients of those that require them are
    compared too. prompt: ends of the parts in which a prompt is read before decoding token by token.
    """

    def work(cp_shard: ThreadShard) -> Tensor:
        q, k, v, *further = (x.chunk(size, 2)[cp_shard.rank] for x in tensors)
        local_positions = None if positions is None else positions.chunk(size, 1)[cp_shard.rank]
        inputs = AttentionInputs(local_positions, rotary=rotary, cp_shard=cp_shard)
        return module(q, k, v, replace(inputs, further=further[0]) if further else inputs)

    shards = torch.cat(in_shards(size, work), 2)
    torch.testing.assert_close(shards, whole, rtol=1e-10, atol=1e-10)
    learned = [x for x in tensors if x.requires_grad]
    if learned:
        shard_and_whole_gradients = (
            torch.autograd.grad(out.sin().sum(), learned, retain_graph=True) for out in (shards, whole)
        )
        for actual, expected in zip(*shard_and_whole_gradients):
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)

    state, outputs, start = None, [], 0
    for end in (*prompt, *range(prompt[-1] + 1, whole.shape[2] + 1)):
        part_positions = None if positions is None else positions[:, start:end]
        q, k, v, *further = (x[:, :, start:end] for x in tensors)
        options = {"further": further[0]} if further else {}
        out, state = module.extend(q, k, v, state, positions=part_positions, rotary=rotary, **options)
        outputs.append(out)
        start = end
    torch.testing.assert_close(torch.cat(outputs, 2), whole, rtol=1e-10, atol=1e-10)
