"""What mechanisms promise where tokens see later ones too (docs/formulas.md, 8), on every point of the algebra."""

import pytest
import torch

from megakernel.attention import AttentionInputs, HeadShard, Rotary
from megakernel.attention.noise import redraw
from megakernel.attention.sequence import Ulysses
from tests.unit.attention.mechanisms import (
    BIDIRECTIONAL,
    FORMS,
    WIDTH,
    assert_close,
    gradients,
    layer,
    packed,
    shard_of,
    tokens,
)
from tests.unit.attention.shards import Table, ThreadShard, check_shards

every_mechanism = pytest.mark.parametrize("name", BIDIRECTIONAL)

ROTARY = Rotary(WIDTH)
DOCUMENTS = packed(24, (3, 4, 13), (8, 17))
PACKED = packed(32, (3, 4, 13, 16), (17,))
"""Documents that begin inside shards, at their edges, and before several of them."""


@pytest.mark.covering(2)
@every_mechanism
@pytest.mark.parametrize("rotary", [None, ROTARY], ids=["plain", "rotary"])
@pytest.mark.parametrize(
    ("length", "padded"), [(1, False), (3, False), (24, False), (24, True)], ids=["1", "3", "24", "padded"]
)
def test_equals_the_quadratic_reference(name, rotary, length, padded, monkeypatch):
    module = layer(name, causal=False)
    q, k, v = tokens(2, length)
    mask = torch.rand(2, length, generator=torch.Generator().manual_seed(0)) > 0.4 if padded else None
    out = module(q, k, v, AttentionInputs(rotary=rotary, padding_mask=mask))
    monkeypatch.setenv("MEGAKERNEL_BACKEND", "reference")
    expected = module(q, k, v, AttentionInputs(rotary=rotary, padding_mask=mask))
    assert_close(out, expected)
    for actual, wanted in zip(gradients(module, out, q, k, v), gradients(module, expected, q, k, v)):
        assert_close(actual, wanted)


@pytest.mark.parametrize("name", [name for name in BIDIRECTIONAL if not FORMS[name].mixes_documents])
def test_documents_in_a_row_do_not_see_each_other(name):
    module = layer(name, causal=False)
    q, k, v = (x.detach() for x in tokens(2, 24))
    out = module(q, k, v, AttentionInputs(positions=DOCUMENTS))
    assert_close(out[:1, :, 4:13], module(*(x[:1, :, 4:13] for x in (q, k, v))))


@pytest.mark.parametrize("name", [name for name in BIDIRECTIONAL if not FORMS[name].changes_constants])
@pytest.mark.parametrize("length", [3, 24])
def test_constant_values_give_constant_output(name, length):
    module = layer(name, causal=False)
    q, k, v = tokens(2, length)
    assert_close(
        module(q, k, torch.full_like(v, 1.5), AttentionInputs(rotary=ROTARY)), torch.full_like(q, 1.5)
    )


@pytest.mark.parametrize("name", [name for name in BIDIRECTIONAL if FORMS[name].changes_constants])
def test_constant_values_change_where_a_mechanism_says_so(name):
    module = layer(name, causal=False)
    q, k, v = tokens(2, 24)
    assert not torch.allclose(module(q, k, torch.full_like(v, 1.5)), torch.full_like(q, 1.5))


@every_mechanism
@pytest.mark.parametrize("size", [2, 4])
def test_shards_of_heads_give_the_unsharded_numbers(name, size):
    kv_heads = max(2, size)
    whole = layer(name, kv_heads=kv_heads, causal=False)
    q, k, v = tokens(2, 24, kv_heads=kv_heads)
    parts = [shard_of(whole, name, HeadShard(rank, size), kv_heads, causal=False) for rank in range(size)]
    for step in (None, 5):
        if step is not None:
            for module in (whole, *parts):
                redraw(module, step)
        outputs = [
            part(*(x.chunk(size, 1)[rank] for x in (q, k, v)), AttentionInputs(rotary=ROTARY))
            for rank, part in enumerate(parts)
        ]
        assert_close(torch.cat(outputs, 1), whole(q, k, v, AttentionInputs(rotary=ROTARY)))


@pytest.mark.covering(2)
@every_mechanism
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("positions", [None, PACKED], ids=["one_document", "packed"])
def test_shards_of_a_sequence_give_the_numbers_of_the_whole(name, size, positions):
    # Two key heads do not divide over four shards: they are repeated for their queries.
    check_shards(layer(name, causal=False), tokens(2, 32), size, positions, ROTARY)


@pytest.mark.parametrize("name", ["performer", "mlk"])
@pytest.mark.parametrize("positions", [None, PACKED], ids=["one_document", "packed"])
def test_the_reference_exchanges_what_the_kernels_do(name, positions, monkeypatch):
    monkeypatch.setenv("MEGAKERNEL_BACKEND", "reference")
    check_shards(layer(name, causal=False), tokens(2, 32), 4, positions, ROTARY)


def test_heads_that_do_not_divide_over_shards_are_refused():
    with pytest.raises(ValueError, match="4 heads do not divide over 3 shards of the sequence"):
        Ulysses(ThreadShard(Table(3), rank=0), num_heads=4, num_kv_heads=2)
