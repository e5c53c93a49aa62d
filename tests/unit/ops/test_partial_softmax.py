"""Partial sums over subsets of keys add up to softmax attention in any order, and so do their gradients."""

from itertools import permutations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megakernel.ops.partial_output import empty_partial_output, log_normalizer, normalized
from megakernel.ops.softmax_attention import fused
from megakernel.ops.softmax_attention.partial import (
    OutputGradient,
    VisibleKeys,
    add_gradients,
    add_sums,
)
from megakernel.ops.softmax_attention.spans import cross_shard_spans
from tests.unit.ops.comparing import random, softmax_reference

pytestmark = pytest.mark.usefixtures("small_chunks")

B, G, KV, N, WIDTH = 2, 2, 2, 12, 8

DOCUMENTS = torch.tensor([[0] * 3 + [3] * 6 + [9] * 3, [-4] * 7 + [7] * 5])
"""Start of each token's document; one began before its sequence."""


def inputs():
    """q, k, v and a weight of every output."""
    heads = (KV * G, KV, KV, KV * G)
    return [random(B, count, N, WIDTH, seed=i) for i, count in enumerate(heads)]


def from_parts(tensors, parts):
    """Output and gradients of queries, keys and values from sums over `parts`: (slice of keys, spans, causal)."""
    q, k, v, grad = (x.detach() for x in tensors)
    q, grad = q.unflatten(1, (KV, G)), grad.unflatten(1, (KV, G))
    keys = [
        (place, VisibleKeys(k[:, :, place], v[:, :, place], spans, None, "causal" if causal else "some"))
        for place, spans, causal in parts
    ]
    total = empty_partial_output(q, WIDTH)
    for _, subset in keys:
        add_sums(total, q, subset)
    out = normalized(total)
    gradient = OutputGradient(grad, out, log_normalizer(total), mean=(grad * out).sum(-1))
    of_queries, of_keys, of_values = (torch.zeros_like(x, dtype=out.dtype) for x in (q, k, v))
    for place, subset in keys:
        add_gradients((of_queries, of_keys[:, :, place], of_values[:, :, place]), q, subset, gradient)
    return out.flatten(1, 2), of_queries.flatten(1, 2), of_keys, of_values


@pytest.mark.parametrize("order", permutations([(0, 5), (5, 6), (6, 12)]), ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_uneven_parts_of_packed_sequences_add_up_in_any_order(order, causal):
    tensors = inputs()
    parts = [
        (
            slice(a, b),
            cross_shard_spans(DOCUMENTS, DOCUMENTS[:, a:b].contiguous(), -a if causal else None),
            False,
        )
        for a, b in order
    ]
    expected = softmax_reference(tensors, causal=causal, positions=torch.arange(N) - DOCUMENTS)
    for found, wanted in zip(from_parts(tensors, parts), expected, strict=True):
        # Sums of float64 in another order.
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_cross_shard_spans_are_those_of_the_whole_sequence():
    whole = cross_shard_spans(DOCUMENTS, DOCUMENTS, 0).mask(slice(None), 0, N)
    parts = [
        cross_shard_spans(DOCUMENTS, DOCUMENTS[:, a : a + 4].contiguous(), -a).mask(slice(None), 0, 4)
        for a in (0, 4, 8)
    ]
    same = DOCUMENTS[:, :, None] == DOCUMENTS[:, None, :]
    assert torch.equal(whole, same.tril())
    assert torch.equal(torch.cat(parts, 2), whole)


@pytest.mark.parametrize("ahead", [None, 0, -5, 5])
@pytest.mark.parametrize("sequences", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize("block", [1, 3, 12])
def test_rectangles_hold_every_pair_once_and_say_which_are_whole(ahead, sequences, block):
    spans = cross_shard_spans(DOCUMENTS[sequences], DOCUMENTS[sequences], ahead)
    wanted = spans.mask(slice(None), 0, N)
    found = torch.zeros_like(wanted, dtype=torch.int64)
    for queries, keys, whole in spans.rectangles(block, 2):
        assert wanted[:, queries, keys].all() or not whole
        assert whole or (keys.stop - keys.start <= 2 and queries.stop - queries.start <= block)
        found[:, queries, keys] += 1
    assert found.max() <= 1
    assert torch.equal(wanted & (found == 1), wanted)


def test_queries_that_see_the_same_keys_are_one_rectangle():
    one = torch.zeros(1, N, dtype=torch.int64)
    assert list(cross_shard_spans(one, one[:, :5].contiguous(), N).rectangles(4, 2)) == [
        (slice(0, N), slice(0, 5), True)
    ]


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float64),
        ("cpu", torch.bfloat16),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_fused_kernels_give_sums_that_add(device, dtype):
    """The second half of the queries: all keys of the first half in two parts, and causally the keys of the second."""
    first, second = ([x.detach().to(dtype) for x in inputs()] for _ in range(2))
    whole = [torch.cat([a.flip(2), b], 2).double() for a, b in zip(first, second)]
    whole[3][:, :, :N] = 0  # nothing depends on the first half's outputs
    q, k, v, grad = (x.to(device, dtype) for x in whole)
    assert fused.supports(q, k, v)
    one = torch.zeros(1, N, dtype=torch.int64, device=device)
    some, others = (slice(5), slice(5, N))  # visible as a whole; fewer or more than the queries
    parts = [
        (place, cross_shard_spans(one, one[:, place].contiguous(), None), False) for place in (others, some)
    ]
    parts.append((slice(N, 2 * N), cross_shard_spans(one, one, 0), True))
    found = from_parts((q[:, :, N:], k, v, grad[:, :, N:]), parts)
    out, of_queries, of_keys, of_values = softmax_reference([x.requires_grad_() for x in whole])
    # On a GPU, half precision is rounded once per part; elsewhere sums are float32 or better.
    tolerance = 1e-12 if dtype == torch.float64 else 2**-6 if device == "cuda" else 1e-5
    for part, whole in zip(found, (out[:, :, N:], of_queries[:, :, N:], of_keys, of_values), strict=True):
        torch.testing.assert_close(part.cpu().double(), whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "width", "taken"), [("bfloat16", 64, True), ("float32", 64, False), ("bfloat16", 60, False)]
)
def test_supports_agrees_with_the_gpu_kernels(dtype, width, taken):
    """Checked with fake tensors, which need no GPU."""
    with FakeTensorMode():
        q, some, k = (
            torch.empty(2, heads, length, width, dtype=getattr(torch, dtype), device="cuda")
            for heads, length in ((6, 128), (6, 64), (2, 128))
        )
        assert fused.supports(q, k, k) == taken
        for queries, causal in ((q, True), (some, False)) if taken else ():
            out, log_sums = fused.attend(queries, k, k, causal)
            assert (out.shape, log_sums.shape) == (queries.shape, queries.shape[:-1])
            assert log_sums.dtype == torch.float32
            parts = fused.gradients(out.float(), queries, k, k, out.float(), log_sums, causal)
            assert [x.shape for x in parts] == [queries.shape, k.shape, k.shape]
