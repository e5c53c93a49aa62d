"""Shards that pass on keys and values read the blocks that the whole sequence reads; shards are threads."""

import pytest
import torch

from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.rotary import Rotary
from megakernel.attention.selected import Selector
from megakernel.config.attention import Attention, expand_preset
from megakernel.ops.selected_attention import by_block, readers, selected_attention
from tests.tiers import tiered
from tests.unit.attention.shards import Table, ThreadShard, in_shards
from tests.unit.ops.comparing import random

B, H, KV, N, WIDTH, VALUES, BLOCK = 2, 4, 2, 48, 4, 3, 3
PACKED = torch.stack(
    [
        # Blocks that reach over the edges of shards, documents that begin at and near them, and one over all.
        torch.cat([torch.arange(9), torch.arange(16), torch.arange(1), torch.arange(22)]),
        torch.arange(N),
    ]
)
POOL = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)


def selector(unit: str, group: int, rope: str) -> Selector:
    selection = {"blocks": 3, "landmarks": 3, "unit": unit, "rope": rope}
    tree = {"preset": "selected", "near": {"block_size": BLOCK, "blocks": 2}, "selection": selection}
    made = Selector(Attention.model_validate(expand_preset(tree)))
    made.selection = made.selection._replace(group=group)
    return made


def tensors(dtype: torch.dtype = torch.float64):
    """q, k, v of whole sequences and a weight of every output."""
    shapes = ((H, WIDTH), (KV, WIDTH), (KV, VALUES), (H, VALUES))
    return [random(B, heads, N, width, seed=i).detach().to(dtype) for i, (heads, width) in enumerate(shapes)]


def in_ring(module: Selector, size: int, positions: torch.Tensor, dtype: torch.dtype = torch.float64):
    """Outputs and gradients over `size` shards; each has a backward of its own, as ranks have."""
    *whole, weight = tensors(dtype)
    leaves = [[x.chunk(size, 2)[i].clone().requires_grad_() for x in whole] for i in range(size)]
    everything = [x for shard in leaves for x in shard]

    def work(shard: ThreadShard):
        here = positions.chunk(size, 1)[shard.rank]
        inputs = AttentionInputs(positions=here, rotary=Rotary(WIDTH), cp_shard=shard, return_state=False)
        out, state = module.attend(*leaves[shard.rank], POOL, inputs, None)
        assert state is None
        # The left neighbor's tokens are a part of this shard's graph.
        loss = (out * weight.chunk(size, 2)[shard.rank]).sum()
        return out.detach(), *torch.autograd.grad(loss, everything, allow_unused=True)

    outputs, *found = zip(*in_shards(size, work))
    sums = [sum(x for x in parts if x is not None) for parts in found]
    return [torch.cat(outputs, 2), *(torch.cat(sums[i::3], 2) for i in range(3))]


def in_one(module: Selector, positions: torch.Tensor, dtype: torch.dtype = torch.float64):
    """Outputs and gradients of whole sequences."""
    *leaves, weight = tensors(dtype)
    leaves = [x.requires_grad_() for x in leaves]
    inputs = AttentionInputs(positions=positions, rotary=Rotary(WIDTH), return_state=False)
    out, _ = module.attend(*leaves, POOL, inputs, None)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(readers, "NUMBERS_ON_CPU", 256)
    monkeypatch.setattr(readers, "GROUP", 3)


@pytest.mark.parametrize("size", tiered([1, 2, 4, 8], [4]))
@pytest.mark.parametrize("unit", ["token", "tile"])
@pytest.mark.parametrize(
    ("group", "rope"), [(0, "position"), (2, "position"), (0, "none")], ids=["", "levels", "unrotated"]
)
def test_a_ring_reads_what_the_whole_sequence_reads(size, unit, group, rope):
    module = selector(unit, group, rope)
    for actual, wanted in zip(in_ring(module, size, PACKED), in_one(module, PACKED), strict=True):
        # Sums of float64 in another order.
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


def test_a_shard_never_holds_the_keys_of_the_whole_sequence(monkeypatch):
    """The largest tensor of keys has the tokens of a shard and of a window."""
    held, take = [], by_block._take_blocks

    def recorded(x, index):
        held.append(x.shape[2])
        return take(x, index)

    monkeypatch.setattr(by_block, "_take_blocks", recorded)
    in_ring(selector("token", 0, "position"), 4, PACKED)
    assert set(held) == {N // 4 + 2 * BLOCK}


def test_a_shard_in_a_ring_has_no_state_and_no_reference_form():
    q, k, v, _ = tensors()
    shard = ThreadShard(Table(2), 0)
    with pytest.raises(ValueError, match="return_state=True: a shard in a ring has no state; expected False"):
        selected_attention(q, k, v, pool=POOL, selected=2, ring=shard)
    with pytest.raises(ValueError, match="backend='reference' reads whole sequences; take backend='chunked'"):
        selected_attention(
            q, k, v, pool=POOL, selected=2, ring=shard, return_state=False, backend="reference"
        )
