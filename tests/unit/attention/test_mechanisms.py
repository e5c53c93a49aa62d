"""Properties of mechanisms (docs/formulas.md, section 8), for every configuration and direction."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megakernel.attention import AttentionInputs, AttentionLayer, HeadShard, Rotary, SequenceState
from megakernel.attention.noise import redraw
from tests.tiers import tiered
from tests.unit.attention.mechanisms import (
    BIDIRECTIONAL,
    CAUSAL,
    CONFIGS,
    DIRECTIONS,
    TREES,
    WIDTH,
    assert_close,
    by_tier,
    gradients,
    layer,
    packed,
    partition_of,
    shard_of,
    tokens,
)
from tests.unit.attention.shards import check_shards


@pytest.mark.parametrize("name", by_tier(TREES))
def test_every_direction_that_can_be_built_is_tested(name):
    for causal, tested in ((True, CAUSAL), (False, BIDIRECTIONAL)):
        try:
            built = layer(name, causal=causal).causal
        except ValueError:
            assert name not in tested
        else:
            assert built == causal
            assert name in tested


@pytest.mark.parametrize("name", by_tier(TREES))
def test_every_mechanism_has_selectable_backends(name, monkeypatch):
    monkeypatch.setenv("MEGAKERNEL_BACKEND", "none of them")
    with pytest.raises(ValueError, match="MEGAKERNEL_BACKEND"):
        layer(name, causal=name in CAUSAL)(*tokens(1, 4))


every_mechanism = pytest.mark.parametrize("name", by_tier(CAUSAL))
every_bidirectional = pytest.mark.parametrize("name", by_tier(BIDIRECTIONAL))
every_direction = pytest.mark.parametrize(("name", "causal"), by_tier(DIRECTIONS))

ROTARY = Rotary(WIDTH)

DOCUMENTS = packed(24, (3, 4, 13), (8, 17))
DOCUMENTS_ACROSS_SHARDS = packed(32, (3, 4, 13, 16), (17,), (8, 16, 24), (7, 15, 25))
"""Documents that begin inside shards, at and next to their edges, and that span several shards."""


def assert_equals_the_reference(module, length, inputs, monkeypatch):
    q, k, v = tokens(2, length)
    out = module(q, k, v, inputs)
    monkeypatch.setenv("MEGAKERNEL_BACKEND", "reference")
    expected = module(q, k, v, inputs)
    assert_close(out, expected)
    for actual, wanted in zip(gradients(module, out, q, k, v), gradients(module, expected, q, k, v)):
        assert_close(actual, wanted)


@pytest.mark.covering(1)
@every_mechanism
@pytest.mark.parametrize("positions", [None, DOCUMENTS], ids=["one_document", "packed"])
@pytest.mark.parametrize("rotary", [None, ROTARY], ids=["plain", "rotary"])
def test_equals_the_quadratic_reference(name, positions, rotary, monkeypatch):
    inputs = AttentionInputs(positions=positions, rotary=rotary)
    assert_equals_the_reference(layer(name), 24, inputs, monkeypatch)


@pytest.mark.covering(2)
@every_bidirectional
@pytest.mark.parametrize("rotary", [None, ROTARY], ids=["plain", "rotary"])
@pytest.mark.parametrize(
    ("length", "padded"), [(1, False), (3, False), (24, False), (24, True)], ids=["1", "3", "24", "padded"]
)
def test_bidirectional_attention_equals_the_quadratic_reference(name, rotary, length, padded, monkeypatch):
    mask = torch.rand(2, length, generator=torch.Generator().manual_seed(0)) > 0.4 if padded else None
    inputs = AttentionInputs(rotary=rotary, padding_mask=mask)
    assert_equals_the_reference(layer(name, causal=False), length, inputs, monkeypatch)


@pytest.mark.parametrize("name", by_tier(name for name in BIDIRECTIONAL if not CONFIGS[name].mixes_documents))
def test_packed_documents_do_not_attend_to_each_other(name):
    module = layer(name, causal=False)
    q, k, v = (x.detach() for x in tokens(2, 24))
    out = module(q, k, v, AttentionInputs(positions=DOCUMENTS))
    assert_close(out[:1, :, 4:13], module(*(x[:1, :, 4:13] for x in (q, k, v))))


@every_direction
def test_gradients_pass_gradcheck(name, causal):
    module = layer(name, causal=causal)
    q, k, v = tokens(1, 9)
    positions = None if CONFIGS[name].mixes_documents else packed(9, (2,))
    assert torch.autograd.gradcheck(
        lambda q, k, v, *_: module(q, k, v, AttentionInputs(positions=positions, rotary=ROTARY)),
        (q, k, v, *module.parameters()),
        fast_mode=True,
    )


@pytest.mark.covering(1)
@every_mechanism
@pytest.mark.parametrize("positions", [None, packed(272, (5, 61, 200))], ids=["one_document", "packed"])
def test_later_tokens_leave_earlier_outputs_bit_identical(name, positions):
    module = layer(name, dtype=torch.float32)
    q, k, v = (x.detach() for x in tokens(1, 272, dtype=torch.float32))
    out = module(q, k, v, AttentionInputs(positions=positions, rotary=ROTARY))
    # Edges of documents, of blocks of 4 and 5, of chunks of 128 and of the 256 tokens of the far context's scan.
    edges = {4, 5, 8, 61, 64, 128, 200, 204, 256}
    for t in sorted({edge + step for edge in edges for step in (-1, 0, 1)}):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, :, t:] = 50 * torch.randn_like(x[:, :, t:])
        assert torch.equal(
            module(*changed, AttentionInputs(positions=positions, rotary=ROTARY))[:, :, :t], out[:, :, :t]
        )


@pytest.mark.parametrize("name", by_tier(name for name in CAUSAL if not CONFIGS[name].weighs_every_pair))
@pytest.mark.usefixtures("short_groups")
def test_later_groups_leave_earlier_outputs_bit_identical(name):
    module = layer(name, dtype=torch.float32)
    q, k, v = (x.detach() for x in tokens(1, 600, dtype=torch.float32))
    out = module(q, k, v)
    for t in (255, 256, 257, 511, 512, 513):
        changed = [torch.cat([x[:, :, :t], -3 * x[:, :, t:]], 2) for x in (q, k, v)]
        assert torch.equal(module(*changed)[:, :, :t], out[:, :, :t])


def extend_by(
    module: AttentionLayer, parts: list[int], q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None
):
    outputs, state = [], None
    edges = torch.tensor([0, *parts]).cumsum(0).tolist()
    for start, end in pairwise(edges):
        part_positions = None if positions is None else positions[:, start:end]
        parts_of = (x[:, :, start:end] for x in (q, k, v))
        out, state = module.extend(*parts_of, state, positions=part_positions, rotary=ROTARY)
        outputs.append(out)
    return torch.cat(outputs, 2)


@pytest.mark.covering(1)
@every_mechanism
@pytest.mark.parametrize("positions", [None, DOCUMENTS], ids=["one_document", "packed"])
@pytest.mark.parametrize(
    "parts",
    tiered([[1] * 24, [11, 1, 1, 11], [4, 8, 5, 7], [23, 1]], [[1] * 24, [11, 1, 1, 11], [4, 8, 5, 7]]),
    ids=str,
)
def test_extending_in_parts_equals_the_whole_sequence(name, positions, parts):
    module = layer(name)
    q, k, v = tokens(2, 24)
    whole = module(q, k, v, AttentionInputs(positions=positions, rotary=ROTARY))
    extended = extend_by(module, parts, q, k, v, positions)
    assert_close(extended, whole)
    for actual, wanted in zip(gradients(module, extended, q, k, v), gradients(module, whole, q, k, v)):
        assert_close(actual, wanted)


@every_mechanism
def test_decoding_token_by_token_isolates_packed_documents(name):
    module, positions = layer(name), packed(24, (3, 12))
    q, k, v = (x.detach() for x in tokens(1, 24))
    outputs, state = [], None
    for index, position in enumerate(positions[0].tolist()):
        token = (x[:, :, index, None] for x in (q, k, v))
        out, state = module.extend(*token, state, positions=position, rotary=ROTARY)
        outputs.append(out)
    whole = module(q, k, v, AttentionInputs(positions=positions, rotary=ROTARY))
    assert_close(torch.cat(outputs, 2), whole)


@every_mechanism
def test_a_long_prompt_continues_token_by_token(name):
    module = layer(name)
    q, k, v = (x.detach() for x in tokens(1, 300))
    assert_close(
        extend_by(module, [290, *[1] * 10], q, k, v, None), module(q, k, v, AttentionInputs(rotary=ROTARY))
    )


@every_direction
def test_padding_anywhere_does_not_change_the_output(name, causal):
    module = layer(name, causal=causal)
    q, k, v = (x.detach() for x in tokens(2, 24))
    mask = torch.rand(2, 24, generator=torch.Generator().manual_seed(0)) > 0.4
    out = module(q, k, v, AttentionInputs(rotary=ROTARY, padding_mask=mask))
    for row, real in enumerate(mask):
        alone = module(*(x[row : row + 1, :, real] for x in (q, k, v)), AttentionInputs(rotary=ROTARY))
        assert_close(out[row : row + 1, :, real], alone)
        assert not out[row, :, ~real].any()


@every_mechanism
def test_padding_between_packed_documents_does_not_change_the_output(name):
    module = layer(name)
    q, k, v = (x.detach() for x in tokens(1, 24))
    real = torch.ones(24, dtype=torch.bool)
    real[[0, 5, 9, 10, 23]] = False
    compact = packed(19, (7, 12))
    positions = torch.zeros(1, 24, dtype=torch.int64)
    positions[:, real] = compact
    out = module(q, k, v, AttentionInputs(positions=positions, rotary=ROTARY, padding_mask=real[None]))
    alone = module(*(x[:, :, real] for x in (q, k, v)), AttentionInputs(positions=compact, rotary=ROTARY))
    assert_close(out[:, :, real], alone)


@every_mechanism
def test_padding_keeps_the_position_of_the_first_token(name):
    module = layer(name)
    q, k, v = (x.detach() for x in tokens(2, 12))
    inputs = AttentionInputs(3, rotary=ROTARY)
    padded = AttentionInputs(3, rotary=ROTARY, padding_mask=torch.ones(2, 12, dtype=torch.bool))
    assert_close(module(q, k, v, padded), module(q, k, v, inputs))


@every_direction
@pytest.mark.parametrize("positions", [torch.arange(8)[None], torch.zeros(2, 5), [0, 1]], ids=str)
def test_positions_that_do_not_fit_are_refused(name, causal, positions):
    module = layer(name, causal=causal)
    with pytest.raises(ValueError, match=r"^positions"):
        module(*tokens(2, 8), AttentionInputs(positions))
    with pytest.raises(ValueError, match=r"^positions" if causal else "causal"):
        module.extend(*tokens(2, 8), positions=positions)


@every_direction
@pytest.mark.parametrize("length", [1, 3, 21])
def test_any_length_and_sequences_of_only_padding(name, causal, length):
    module = layer(name, causal=causal)
    q, k, v = tokens(2, length)
    mask = torch.tensor([True, False])[:, None].expand(2, length)
    out = module(q, k, v, AttentionInputs(padding_mask=mask))
    assert_close(out[:1], module(q[:1], k[:1], v[:1]))
    assert not out[1].any()
    assert all(gradient.isfinite().all() for gradient in gradients(module, out, q, k, v))


@pytest.mark.parametrize(
    ("name", "causal"),
    by_tier((name, causal) for name, causal in DIRECTIONS if not CONFIGS[name].spec.changes_constants),
)
@pytest.mark.parametrize(
    ("length", "positions"), [(3, None), (24, None), (24, DOCUMENTS)], ids=["3", "24", "packed"]
)
def test_constant_values_give_constant_output(name, causal, length, positions):
    q, k, v = tokens(2, length)
    inputs = AttentionInputs(positions=positions, rotary=ROTARY)
    out = layer(name, causal=causal)(q, k, torch.full_like(v, 1.5), inputs)
    assert_close(out, torch.full_like(q, 1.5))


@pytest.mark.parametrize("name", [name for name in BIDIRECTIONAL if CONFIGS[name].spec.changes_constants])
def test_constant_values_change_in_mechanisms_that_declare_it(name):
    module = layer(name, causal=False)
    q, k, v = tokens(2, 24)
    assert not torch.allclose(module(q, k, torch.full_like(v, 1.5)), torch.full_like(q, 1.5))


@every_direction
@pytest.mark.parametrize("size", tiered([2, 4], [4]))
def test_tensor_parallel_shards_equal_the_unsharded_layer(name, causal, size):
    check_tensor_shards(name, causal, [HeadShard(rank, size) for rank in range(size)], max(2, size))


@pytest.mark.parametrize(
    ("name", "causal"),
    by_tier((name, causal) for name, causal in DIRECTIONS if CONFIGS[name].selection is None),
)
def test_shards_that_hold_the_same_key_head_equal_the_unsharded_layer(name, causal):
    passed = [set() for _ in range(4)]
    shards = [
        HeadShard(rank, 4, copied=lambda x, used=passed[rank]: used.add(id(x)) or x) for rank in range(4)
    ]
    parts = check_tensor_shards(name, causal, shards, 2)
    # Otherwise ranks would not sum its gradient with those of the copies.
    for part, used in zip(parts, passed):
        copied = {key for key in part.sharded_parameters() if key not in part.per_query_head}
        assert all(id(parameter) in used for key, parameter in part.named_parameters() if key in copied)


def check_tensor_shards(name, causal, shards, kv_heads):
    """Check that shards of a layer together have the outputs and gradients of the whole layer; returns them."""
    size, whole = len(shards), layer(name, kv_heads=kv_heads, causal=causal)
    q, k, v = tokens(2, 24, kv_heads=kv_heads)
    inputs = AttentionInputs(positions=DOCUMENTS if causal else None, rotary=ROTARY)
    parts = [shard_of(whole, name, shard, kv_heads, causal) for shard in shards]
    for step in (None, 5):
        if step is not None:
            for module in (whole, *parts):
                redraw(module, step)
        expected = whole(q, k, v, inputs)
        inputs_of_shards = (
            [x.chunk(min(size, x.shape[1]), 1)[rank * min(size, x.shape[1]) // size] for x in (q, k, v)]
            for rank in range(size)
        )
        out = torch.cat([part(*qkv, inputs) for part, qkv in zip(parts, inputs_of_shards, strict=True)], 1)
        assert_close(out, expected)

    wanted = dict(zip(dict(whole.named_parameters()), gradients(whole, expected, q)[1:]))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (out * weights).sum().backward()
    for key, gradient in wanted.items():
        grads = [dict(part.named_parameters())[key].grad for part in parts]
        partition = partition_of(parts[0], key, kv_heads)
        copies = size if partition.dimension is None else partition.copies
        sums = [sum(grads[rank : rank + copies]) for rank in range(0, size, copies)]
        assert_close(
            sums[0] if partition.dimension is None else torch.cat(sums, partition.dimension), gradient
        )
    return parts


@pytest.mark.covering(1)
@every_mechanism
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("positions", [None, DOCUMENTS_ACROSS_SHARDS], ids=["one_document", "packed"])
@pytest.mark.usefixtures("small_chunks")
def test_context_parallel_shards_equal_the_whole_sequence(name, size, positions):
    # Chosen blocks pass in a ring: tests of their op and of real ranks compare its gradients.
    differentiate = CONFIGS[name].selection is None
    module, inputs = layer(name, kv_heads=4), tokens(4, 32, kv_heads=4)
    check_shards(module, inputs, size, positions, ROTARY, differentiate=differentiate)


@pytest.mark.covering(2)
@every_bidirectional
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("positions", [None, DOCUMENTS_ACROSS_SHARDS], ids=["one_document", "packed"])
def test_bidirectional_context_parallel_shards_equal_the_whole_sequence(name, size, positions):
    # Two key heads do not divide over four shards: they are repeated for their query heads.
    check_shards(layer(name, causal=False), tokens(4, 32), size, positions, ROTARY)


@pytest.mark.parametrize("name", ["performer", "mlk"])
@pytest.mark.parametrize("positions", [None, DOCUMENTS_ACROSS_SHARDS], ids=["one_document", "packed"])
def test_the_reference_backend_supports_context_parallelism(name, positions, monkeypatch):
    monkeypatch.setenv("MEGAKERNEL_BACKEND", "reference")
    check_shards(layer(name, causal=False), tokens(4, 32), 4, positions, ROTARY)


@every_mechanism
def test_the_declared_state_size_is_that_of_the_decoding_state(name):
    module = layer(name)
    # Whole blocks and groups of two, since landmarks are added at their ends.
    lengths = [count * (CONFIGS[name].block_size or 10) for count in (4, 6)]
    sizes = []
    for length in lengths:
        q, k, v = (x.detach() for x in tokens(1, length))
        _, state = module.extend(q, k, v)
        sizes.append(_state_numel(state))
    constant, per_token = module.state_sizes
    # The log scale of each key head is not counted.
    assert sizes == [constant + length * per_token for length in lengths]
    assert module.is_recurrent == (per_token == 0)


@every_mechanism
@pytest.mark.parametrize("positions", [None, DOCUMENTS], ids=["one_document", "packed"])
def test_a_state_made_token_by_token_is_no_larger_than_one_made_at_once(name, positions):
    module = layer(name)
    q, k, v = (x.detach() for x in tokens(2, 24))
    expected, whole = module.extend(q, k, v, positions=positions)
    state, outputs = None, []
    for place in range(24):
        at = None if positions is None else positions[:, place, None]
        out, state = module.extend(*(x[:, :, place, None] for x in (q, k, v)), state, positions=at)
        outputs.append(out)
    assert_close(torch.cat(outputs, 2), expected)
    assert _state_numel(state) <= _state_numel(whole)


def _state_numel(state: SequenceState) -> int:
    flat, stack = [], [state.inner]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            flat.append(item)
        elif item is not None:
            stack.extend(item)
    return sum(x.numel() for x in flat if x.dim() > 2)
