"""Bytes that context-parallel ranks send, and whether local work hides the exchange."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from megakernel import attention
from megakernel.attention import AttentionInputs
from megakernel.ops.flurka_attention import chunked as flurka_chunked
from megakernel.ops.kernel_attention import chunked as kernel_chunked
from megakernel.parallel import state_exchange
from tests.distributed.processes import cpu_mesh, run_ranks
from tests.tiers import tiered

HEADS, KV_HEADS, WIDTH = 2, 1, 4
FLOAT32 = 4
LENGTHS = tiered([2**16, 2**20], [2**16])


def attend(mesh, tokens, preset):
    """Run a layer forward and backward on this rank's shard of `tokens`; (bytes sent by purpose, late exchanges)."""
    torch.manual_seed(0)
    layer = attention.build(preset, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=WIDTH, rotary=False)
    own = tokens // mesh.cp.size
    q, k, v = (torch.randn(1, heads, own, WIDTH, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS))
    shard = mesh.new_cp_shard()
    layer(q, k, v, AttentionInputs(cp_shard=shard)).square().mean().backward()
    return shard.traffic.take()


def sent_by_layer(tokens, preset, size, **parallel):
    with cpu_mesh(context=size, **parallel) as mesh:
        sent, _ = attend(mesh, tokens, preset)
        return dict(sent)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_kernel_layers_traffic_does_not_depend_on_the_sequence_length(tokens):
    for sent in run_ranks(sent_by_layer, 2, tokens, "linear", 2):
        state = KV_HEADS * WIDTH * (WIDTH + 1)
        scales_and_carry = (
            KV_HEADS + 1
        )  # a log scale per head, and whether the shard carries the entering state over
        assert sent == {"state": FLOAT32 * ((state + scales_and_carry) + state)}


@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_flurka_layer_sends_its_state_and_one_window_for_any_sequence_length(tokens):
    tree = {"preset": "flurka", "compression": {"block_size": 64, "rank": 2}}
    results = run_ranks(sent_by_layer, 2, tokens, tree, 2)
    features = 2 * WIDTH  # hedgehog's two halves
    state = KV_HEADS * features * (WIDTH + 1)
    window = KV_HEADS * 64 * 2 * WIDTH
    for rank, sent in enumerate(results):
        assert sent["state"] == FLOAT32 * (state + KV_HEADS + 1 + state)
        # Rank 0 sends its last block to the right, rank 1 its gradient to the left.
        assert sent["window"] == FLOAT32 * window, rank


@pytest.mark.parametrize("tokens", [512, 1024])
def test_ring_attention_sends_keys_values_and_their_gradients(tokens):
    size, own = 3, tokens // 4
    keys = own * KV_HEADS * 2 * WIDTH  # keys and values; two query heads that share a key head send it once
    for sent in run_ranks(sent_by_layer, size, own * size, "softmax", size):
        # Keys and values rotate in forward and backward, and in backward their gradients too.
        assert sent == {"keys": FLOAT32 * (size - 1) * 3 * keys}


def bytes_of_state(size, method):
    return sent_by_layer(512 * size, "linear", size, state_exchange=method).get("state", 0)


def test_gather_sends_the_state_to_every_other_rank():
    two, four = (set(run_ranks(bytes_of_state, size, size, "gather")) for size in (2, 4))
    assert len(two) == len(four) == 1
    assert four.pop() == 3 * two.pop()


def test_the_ring_sends_one_state_per_direction():
    state = FLOAT32 * KV_HEADS * WIDTH * (WIDTH + 1)
    scales = FLOAT32 * KV_HEADS
    # In forward all ranks but the last send, in backward all but the first.
    middle = 2 * state + scales
    assert run_ranks(bytes_of_state, 4, 4, "ring") == [state + scales, middle, middle, state]


class Clock:
    """Counts calls, each of which is a unit of local work."""

    def __init__(self):
        self.now = 0

    def tick(self, function):
        def ticking(*args, **kwargs):
            self.now += 1
            return function(*args, **kwargs)

        return ticking


class Delayed:
    """A collective that takes as long as `units` of local work."""

    def __init__(self, work, clock, units):
        self.work, self.clock, self.done = work, clock, clock.now + units

    def is_completed(self):
        return self.clock.now >= self.done

    def wait(self):
        self.work.wait()


@contextmanager
def delayed(units):
    """An exchange takes as long as the sums of `units` groups of tokens, which the clock counts."""
    clock, real = Clock(), dist.all_gather_into_tensor
    modules = (kernel_chunked, flurka_chunked)
    originals = [(module, module._sums, module.GROUP) for module in modules]
    for module in modules:
        module._sums, module.GROUP = clock.tick(module._sums), 256
    state_exchange.dist.all_gather_into_tensor = lambda *args, **kwargs: Delayed(
        real(*args, **kwargs), clock, units
    )
    yield
    state_exchange.dist.all_gather_into_tensor = real
    for module, sums, group in originals:
        module._sums, module.GROUP = sums, group


def late_exchanges(preset, units):
    with cpu_mesh(context=2) as mesh, delayed(units):
        return attend(mesh, 2 * 2048, preset)[1]


@pytest.mark.parametrize("preset", ["linear", "flurka"])
def test_local_work_hides_an_exchange_that_takes_no_longer(preset):
    groups = 2048 // 256
    assert run_ranks(late_exchanges, 2, preset, groups) == [0, 0]
    # Forward and backward each wait once for a longer exchange.
    assert run_ranks(late_exchanges, 2, preset, groups + 1) == [2, 2]
