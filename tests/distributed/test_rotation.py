"""Ring attention: softmax layers whose heads do not divide over context ranks rotate keys and values."""

import pytest
import torch

from megakernel import attention
from megakernel.attention import AttentionInputs
from megakernel.parallel.tensor import head_shard
from tests.distributed.processes import cpu_mesh, run_ranks

BATCH, TOKENS, DIM = 2, 32, 8

LAYOUTS = [{"context": 2}, {"context": 4}, {"tensor": 2, "context": 2}]
HEADS = {
    # Neither divides over shards of tensor ranks.
    "3 heads": (3, 3, "auto"),
    "1 head": (1, 1, "auto"),
    "3 heads, 1 key head": (3, 1, "auto"),
    "6 heads, 2 key heads": (6, 2, "auto"),
    "8 heads, 4 key heads, forced": (8, 4, "ring"),
}
PACKED = torch.stack(
    [
        # Documents end inside shards, at their edges, and after several of them.
        torch.cat([torch.arange(length) for length in (3, 13, 9, 3, 4)]),
        torch.cat([torch.arange(7, 11), torch.arange(28)]),
    ]
)
CASES = [
    (name, causal, packed, dtype)
    for name in HEADS
    for causal in (True, False)
    for packed in (True, False)
    for dtype in (torch.float64, torch.float32)
]


def outputs_and_gradients(case, heads=attention.ALL_HEADS, cp_shard=attention.WHOLE_SEQUENCE):
    """Output and gradients of one layer's queries, keys and values."""
    name, causal, packed, dtype = case
    num_heads, kv_heads, exchange = HEADS[name]
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, count, TOKENS, DIM) for count in (num_heads, kv_heads, kv_heads, num_heads)]
    wholes = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    parts = [x.chunk(heads.size, 1)[heads.rank].chunk(cp_shard.size, 2)[cp_shard.rank] for x in wholes]
    q, k, v, weight = (x.clone().requires_grad_() for x in parts)
    layer = attention.build(
        "softmax",
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=DIM,
        causal=causal,
        heads=heads,
        softmax_exchange=exchange,
    )
    positions = PACKED.chunk(cp_shard.size, 1)[cp_shard.rank] if packed else None
    out = layer(
        q, k, v, AttentionInputs(positions=positions, rotary=attention.Rotary(DIM), cp_shard=cp_shard)
    )
    (out * weight).sum().backward()
    return out.detach(), q.grad, k.grad, v.grad


def heads_divide(case, sizes):
    """Whether the heads divide over the layout's tensor ranks."""
    return all(heads % sizes.get("tensor", 1) == 0 for heads in HEADS[case[0]][:2])


def all_cases_on_ranks(sizes):
    with cpu_mesh(**sizes) as mesh:
        return {
            case: outputs_and_gradients(case, head_shard(mesh.tp), mesh.new_cp_shard())
            for case in CASES
            if heads_divide(case, sizes)
        }


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def layout(request):
    sizes = request.param
    heads, shards = sizes.get("tensor", 1), sizes["context"]
    return heads, shards, run_ranks(all_cases_on_ranks, heads * shards, sizes)


def test_ring_attention_equals_attention_in_one_process(layout):
    heads, shards, results = layout
    for case in results[0]:
        expected = outputs_and_gradients(case)
        # Sums in another order.
        tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}[case[-1]]
        for rank, actual in enumerate(result[case] for result in results):
            for part, whole in zip(actual, expected, strict=True):
                expected_part = whole.chunk(heads, 1)[rank % heads].chunk(shards, 2)[rank // heads]
                torch.testing.assert_close(
                    part,
                    expected_part,
                    rtol=tolerance,
                    atol=tolerance,
                    msg=lambda text, case=case: f"{case}: {text}",
                )


def two_rotations(shards):
    """Two rotations in flight at once; the second is awaited first."""
    with cpu_mesh(context=shards) as mesh:
        rank, cp_shard = mesh.cp.rank, mesh.new_cp_shard()
        grid = torch.arange(12.0).view(3, 4) + 100 * rank
        first = cp_shard.start_rotation(
            (grid.to(torch.bfloat16), grid.T.double(), torch.tensor([rank, 2**40 + rank]))
        )
        second = cp_shard.start_rotation((torch.tensor([rank % 2 == 0, True]), grid.new_empty(0)))
        return second.wait(), first.wait()


@pytest.mark.parametrize("shards", [2, 3])
def test_every_shard_receives_the_tensors_of_the_previous_shard(shards):
    for rank, (second, first) in enumerate(run_ranks(two_rotations, shards, shards)):
        before = (rank - 1) % shards
        grid = torch.arange(12.0).view(3, 4) + 100 * before
        expected = (grid.to(torch.bfloat16), grid.T.double(), torch.tensor([before, 2**40 + before]))
        for actual, wanted in zip(first, expected, strict=True):
            assert torch.equal(actual, wanted)
        assert second[0].tolist() == [before % 2 == 0, True]
        assert second[1].shape == (0,)
