"""Ring attention equals attention over whole sequences; shards are threads, each with its own backward."""

import pytest
import torch

from megakernel.ops.softmax_attention import partial, ring
from megakernel.ops.softmax_attention.ring import ring_attention
from tests.unit.attention.shards import ThreadShard, in_shards
from tests.unit.ops.comparing import random, softmax_reference

pytestmark = pytest.mark.usefixtures("small_chunks")

B, N, WIDTH, VALUES = 2, 24, 4, 3
HEADS = [(3, 1), (1, 1), (4, 2)]

PACKED = torch.stack(
    [
        # Documents that begin inside shards, at their edges, and before the sequence; one covers several shards.
        torch.cat([torch.arange(5, 8), torch.arange(18), torch.arange(3)]),
        torch.cat([torch.arange(6), torch.arange(1), torch.arange(5), torch.arange(12)]),
    ]
)


def inputs(heads: int = 3, kv_heads: int = 1, values: int = VALUES):
    """q, k, v of whole sequences and a weight of every output."""
    shapes = ((heads, WIDTH), (kv_heads, WIDTH), (kv_heads, values), (heads, values))
    return [random(B, count, N, width, seed=i) for i, (count, width) in enumerate(shapes)]


def rotated(size, tensors, *, shard_of=lambda cp_shard: cp_shard, **options):
    """Output and gradients from `size` shards of ring attention, concatenated."""

    def work(cp_shard: ThreadShard):
        def mine(x, dim):
            return x.detach().chunk(size, dim)[cp_shard.rank]

        here = {key: mine(x, 1) if isinstance(x, torch.Tensor) else x for key, x in options.items()}
        *leaves, weight = (mine(x, 2).clone().requires_grad_() for x in tensors)
        out = ring_attention(*leaves, ring=shard_of(cp_shard), **here)
        return out, *torch.autograd.grad((out * weight).sum(), leaves)

    return [torch.cat(parts, 2) for parts in zip(*in_shards(size, work))]


def assert_equal(actual, wanted):
    for part, whole in zip(actual, wanted, strict=True):
        # Sums of float64 in another order.
        torch.testing.assert_close(part, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("positions", "values"),
    [(0, WIDTH), (0, VALUES), (PACKED, WIDTH)],
    ids=["fused", "whole_sequences", "packed"],
)
def test_rotating_keys_give_attention_over_whole_sequences(size, heads, causal, positions, values):
    tensors = inputs(*heads, values)
    options = {"causal": causal, "positions": positions}
    assert_equal(rotated(size, tensors, **options), softmax_reference(tensors, **options))


@pytest.mark.parametrize("window", [1, 5, 12, 13])
@pytest.mark.parametrize(
    ("positions", "values"),
    [(0, WIDTH), (0, VALUES), (PACKED, WIDTH)],
    ids=["fused", "whole_sequences", "packed"],
)
def test_a_window_reaches_across_shards(window, positions, values):
    tensors = inputs(values=values)
    options = {"window": window, "positions": positions}
    assert_equal(rotated(4, tensors, **options), softmax_reference(tensors, **options))


@pytest.mark.parametrize("positions", [0, PACKED], ids=["whole_sequences", "packed"])
def test_masked_keys_do_not_count_on_any_shard(positions):
    tensors = inputs()
    mask = torch.rand(B, N, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[0, :12] = False
    mask[1] = False  # this sequence's queries see nothing
    options = {"causal": False, "positions": positions, "key_mask": mask}
    found = rotated(3, tensors, **options)
    assert_equal(found, softmax_reference(tensors, **options))
    assert not found[0][1].any()


@pytest.mark.parametrize("values", [WIDTH, VALUES], ids=["fused", "blocks"])
def test_large_scores_neither_overflow_nor_vanish(values):
    tensors = inputs(values=values)
    with torch.no_grad():
        tensors[0] *= 1e3
    assert_equal(rotated(4, tensors, causal=True), softmax_reference(tensors, causal=True))


@pytest.mark.parametrize("values", [WIDTH, VALUES], ids=["fused", "blocks"])
def test_half_precision_is_summed_in_float32(values):
    halves = [x.detach().to(torch.bfloat16) for x in inputs(values=values)]
    wanted = softmax_reference([x.double().requires_grad_() for x in halves], causal=True)
    found = rotated(4, halves, causal=True)
    assert {x.dtype for x in found} == {torch.bfloat16}
    for part, whole in zip(found, wanted, strict=True):
        # The result is rounded once to 8 bits; where terms cancel, float32 errors remain.
        torch.testing.assert_close(part.double(), whole, rtol=2**-8, atol=1e-5)


class Counting:
    """A shard that counts the bytes it sends."""

    def __init__(self, cp_shard: ThreadShard, sent: list[int]):
        self.cp_shard, self.rank, self.size, self.sent = cp_shard, cp_shard.rank, cp_shard.size, sent

    def start_rotation(self, tensors):
        self.sent[self.rank] += sum(x.numel() * x.element_size() for x in tensors)
        return self.cp_shard.start_rotation(tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("options", "each"), [({}, 0), ({"positions": PACKED}, 8)], ids=["whole", "packed"])
def test_every_shard_sends_the_bytes_of_the_formula(dtype, options, each):
    size, sent = 4, [0] * 4
    tensors = [x.detach().to(dtype) for x in inputs(3, 1)]
    rotated(size, tensors, shard_of=lambda cp_shard: Counting(cp_shard, sent), **options)
    keys = 1 * (WIDTH + VALUES)  # of one key head, whatever the number of query heads
    forward = (size - 1) * B * (N // size) * (keys * dtype.itemsize + each)
    backward = (size - 1) * B * (N // size) * (keys * (dtype.itemsize + 4) + each)
    assert sent == [forward + backward] * size


class Alone:
    """The first of three shards, whose neighbor happens to hold the same keys; records the order of events."""

    rank, size = 0, 3

    def __init__(self):
        self.events: list[str] = []

    def start_rotation(self, tensors):
        self.events.append(f"send {len(tensors)} {tensors[0].dtype}".replace("torch.", ""))
        return Arriving(tensors, self.events)


class Arriving:
    def __init__(self, tensors, events):
        self.tensors, self.events = tensors, events

    def wait(self):
        self.events.append("wait")
        return self.tensors


def test_communication_of_the_next_keys_overlaps_computation(monkeypatch):
    alone = Alone()
    for name in ("add_sums", "add_gradients"):
        work = getattr(ring, name)
        monkeypatch.setattr(ring, name, lambda *args, work=work: (alone.events.append("weigh"), work(*args)))
    q, k, v, _ = (x.detach().to(torch.bfloat16).requires_grad_() for x in inputs())
    out = ring_attention(q, k, v, ring=alone, causal=False)
    keys, gradients = "send 2 bfloat16", "send 2 float32"
    assert alone.events == [keys, "weigh", "wait", keys, "weigh", "wait", "weigh"]
    alone.events.clear()
    out.sum().backward()
    # Gradients follow their keys one hop behind, and are in flight while the next keys are processed.
    first = [keys, "weigh", "wait", keys, "weigh", gradients, "wait"]
    assert alone.events == [*first, "weigh", "wait", gradients, "wait"]


def computed_pairs(monkeypatch, size, **options):
    """Pairs of queries and keys whose scores forward and backward computed on all shards, and the most in one tile."""
    blocks = []
    scores = partial._scores
    monkeypatch.setattr(partial, "_scores", lambda q, k: blocks.append(scores(q, k)) or blocks[-1])
    rotated(size, inputs(1, 1), **options)
    sizes = [block.numel() // B for block in blocks]
    return sum(sizes), max(sizes)


def test_one_block_of_weights_exists_at_once_and_none_of_the_future(monkeypatch):
    pairs, most = computed_pairs(monkeypatch, 3, causal=True)
    assert most <= partial.QUERIES * partial.KEYS
    # Shards of 8 tokens: of nine pairs of shards, three are in the future, three are whole, and in the three on the
    # diagonal, blocks of 4 queries see 4 or 8 keys.
    assert pairs == 2 * (3 * 8 * 8 + 3 * (4 * 4 + 4 * 8))


def test_pairs_of_different_documents_are_not_computed(monkeypatch):
    short = torch.arange(N).remainder(4).expand(B, -1)
    pairs, _ = computed_pairs(monkeypatch, 3, causal=True, positions=short)
    assert pairs == 2 * N * 4


def test_shapes_that_do_not_fit_are_named():
    q, k, v, _ = inputs()
    with pytest.raises(ValueError, match="k has shape"):
        ring_attention(q, k[:, :, 1:], v, ring=ThreadShard.__new__(ThreadShard))
