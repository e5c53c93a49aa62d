"""Exchanges between context-parallel ranks give the results of the whole sequence, forward and backward."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megakernel.analysis.planning.ledger import Ledger
from megakernel.config import Parallel
from megakernel.model.settings import model_settings
from megakernel.ops.kernel_attention import kernel_attention
from megakernel.ops.state import EMPTY, KernelState, empty_state, keep, merge
from megakernel.parallel import exchange_method, prepare_device, state_exchange
from megakernel.parallel.mesh import Mesh
from megakernel.training.engine import Engine
from tests.distributed.processes import cpu_mesh, run_ranks, this_process
from tests.tiers import tiered

from ..unit.config import trees

SIZES = [2, 4]
METHODS = {"gather": ("gather", 1), "ring": ("ring", 1), "ring in parts": ("ring", 2)}
"""parallel.state_exchange, and the number of parts in which a state is passed."""

BATCH, HEADS, FEATURES, WIDTH, TOKENS = 16, 2, 3, 4, 6


def test_a_stream_holds_what_it_reads_until_its_result_is_taken():
    """A GPU frees memory for the current stream at once, whatever another stream still reads."""
    read = torch.ones(3)
    alive = weakref.ref(read)
    pending = state_exchange._StreamResult(lambda read=read: read, None, None)
    del read
    assert alive() is not None
    del pending
    assert alive() is None


def assert_close(actual, expected, dtype):
    # Only the order of the sums differs.
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 0.0}[dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def states(shards, dtype):
    """The state of each shard, whether it carries the entering state over, and a weight for the entering state."""
    generator = torch.Generator().manual_seed(0)
    sums = torch.randn(shards, BATCH, HEADS, FEATURES, WIDTH, generator=generator, dtype=dtype)
    log_scales = 20 * torch.randn(shards, BATCH, HEADS, generator=generator, dtype=dtype)
    log_scales[:, 1::4] = 0.0
    log_scales[:2, 2::4], sums[:2, 2::4] = EMPTY, 0.0
    # Sequence b carries over shard p where bit p of b is set: every pattern of document starts.
    carries = torch.arange(BATCH) >> torch.arange(shards)[:, None] & 1 == 1
    return (
        sums.requires_grad_(),
        log_scales,
        carries,
        torch.randn(sums.shape, generator=generator, dtype=dtype),
    )


def entering_states(shards, dtype, direction, method):
    chosen, parts = METHODS[method]
    state_exchange.ring_parts = lambda size, message_bytes: parts
    with cpu_mesh(context=shards, state_exchange=chosen) as mesh:
        sums, log_scales, carries, weights = states(shards, dtype)
        cp_shard, rank = mesh.new_cp_shard(), mesh.cp.rank
        own = sums[rank].detach().requires_grad_()
        begin = {"before": cp_shard.start_prefix, "behind": cp_shard.start_suffix}[direction]
        pending = begin(KernelState(own, log_scales[rank]), carries[rank])
        entering = pending.wait()
        (entering.sums * weights[rank]).sum().backward()
        assert not entering.log_scale.requires_grad
        return entering.sums.detach(), entering.log_scale, own.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shards", SIZES)
@pytest.mark.parametrize("direction", ["before", "behind"])
@pytest.mark.parametrize("method", METHODS)
def test_the_entering_state_is_the_state_of_all_earlier_or_later_keys(method, direction, shards, dtype):
    sums, log_scales, carries, weights = states(shards, dtype)
    entering = empty_state(KernelState(sums[0], log_scales[0]))
    expected, loss = {}, 0.0
    for cp_shard in range(shards) if direction == "before" else reversed(range(shards)):
        expected[cp_shard] = entering
        loss = loss + (entering.sums * weights[cp_shard]).sum()
        entering = merge(keep(entering, carries[cp_shard]), KernelState(sums[cp_shard], log_scales[cp_shard]))
    loss.backward()
    results = run_ranks(entering_states, shards, shards, dtype, direction, method)
    for cp_shard, (actual, log_scale, grad) in enumerate(results):
        assert torch.equal(log_scale, expected[cp_shard].log_scale)
        assert_close(actual, expected[cp_shard].sums.detach(), dtype)
        assert_close(grad, sums.grad[cp_shard], dtype)


def decays(shards):
    """Decay of a state over each shard, 0 where a document starts; of very different sizes."""
    generator = torch.Generator().manual_seed(1)
    factors = torch.exp(-6 * torch.rand(shards, BATCH, HEADS, generator=generator, dtype=torch.float64))
    factors[torch.rand(factors.shape, generator=generator) < 0.2] = 0.0
    return factors.requires_grad_()


def decayed_states(shards, direction, method):
    chosen, parts = METHODS[method]
    state_exchange.ring_parts = lambda size, message_bytes: parts
    with cpu_mesh(context=shards, state_exchange=chosen) as mesh:
        sums, _, _, weights = states(shards, torch.float64)
        cp_shard, rank = mesh.new_cp_shard(), mesh.cp.rank
        own, factor = (x[rank].detach().requires_grad_() for x in (sums, decays(shards)))
        begin = {"before": cp_shard.start_prefix, "behind": cp_shard.start_suffix}[direction]
        entering = begin(KernelState(own, torch.zeros(BATCH, HEADS, dtype=torch.float64)), factor).wait()
        decayed = entering.sums * entering.log_scale.exp()[..., None, None]
        (decayed * weights[rank]).sum().backward()
        return decayed.detach(), own.grad, factor.grad


@pytest.mark.parametrize("direction", ["before", "behind"])
@pytest.mark.parametrize("method", METHODS)
def test_decaying_states_and_their_gradients_match_the_whole_sequence(method, direction):
    shards = 4
    sums, _, _, weights = states(shards, torch.float64)
    factors = decays(shards)
    entering, expected, loss = torch.zeros_like(sums[0]), {}, 0.0
    for shard in range(shards) if direction == "before" else reversed(range(shards)):
        expected[shard] = entering
        loss = loss + (entering * weights[shard]).sum()
        entering = entering * factors[shard][..., None, None] + sums[shard]
    loss.backward()
    for shard, results in enumerate(run_ranks(decayed_states, shards, shards, direction, method)):
        for actual, wanted in zip(results, (expected[shard], sums.grad[shard], factors.grad[shard])):
            assert_close(actual, wanted.detach(), torch.float64)


def overlapping_layers(x, cp_shard, recompute):
    """Two layers, each with two exchanges in flight, which are awaited in reverse order."""

    def layer(x):
        carries = torch.ones(len(x), dtype=torch.bool)
        first = cp_shard.start_prefix(KernelState(x.tanh(), x.new_zeros(x.shape[:2])), carries)
        second = cp_shard.start_prefix(KernelState(x.sin(), x.new_zeros(x.shape[:2])), carries)
        return x + second.wait().sums * first.wait().sums

    for _ in range(2):
        x = layer(x) if recompute is None else checkpoint(layer, x, use_reentrant=recompute == "reentrant")
    return x


def overlapping_gradients(shards, recompute, method):
    with cpu_mesh(context=shards, state_exchange=method) as mesh:
        x = torch.linspace(-1, 1, shards * 24, dtype=torch.float64).view(shards, 1, 2, 3, 4)[mesh.cp.rank]
        x.requires_grad_()
        out = overlapping_layers(x, mesh.new_cp_shard(), recompute)
        (out * out).sum().backward()
        return out.detach(), x.grad


@pytest.mark.parametrize("method", ["gather", "ring"])
@pytest.mark.parametrize("recompute", [None, "reentrant", "saved"])
def test_overlapping_and_recomputed_exchanges_keep_the_gradients(recompute, method):
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(2, 1, 2, 3, 4).requires_grad_()
    y = x
    for _ in range(2):
        y = torch.stack([y[0], y[1] + y[0].sin() * y[0].tanh()])
    (y * y).sum().backward()
    for rank, (out, grad) in enumerate(run_ranks(overlapping_gradients, 2, 2, recompute, method)):
        assert_close(out, y[rank].detach(), torch.float64)
        assert_close(grad, x.grad[rank], torch.float64)


def attend(x, projection, positions, backend, exchange=None):
    """Kernel attention of q, k and v, stacked in x (3, B, H, N, d)."""
    options = {"positions": positions, "exchange": exchange, "backend": backend}
    return kernel_attention(*x, feature_map="hedgehog", projection=projection, **options)


def attend_shard(method, x, projection):
    with cpu_mesh(context=2, state_exchange=method) as mesh:
        own = x.chunk(2, 3)[mesh.cp.rank].clone().requires_grad_()
        projection.requires_grad_()
        position = mesh.cp.rank * own.shape[3]
        out = attend(own, projection, position, "triton", mesh.new_cp_shard().start_prefix)
        out.square().sum().backward()
        return out.detach(), own.grad, projection.grad


@pytest.mark.parametrize("method", tiered(["gather", "ring"], ["ring"]))
def test_kernels_over_ranks_give_the_outputs_and_gradients_of_the_whole_sequence(method, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    draw = torch.Generator().manual_seed(2)
    x, projection = torch.randn(3, 1, 2, 48, 8, generator=draw), torch.randn(2, 8, 8, generator=draw)
    shards = run_ranks(attend_shard, 2, method, x, projection)
    x, projection = (leaf.double().requires_grad_() for leaf in (x, projection))
    out = attend(x, projection, 0, "chunked")
    out.square().sum().backward()
    outputs, input_gradients, projection_gradients = zip(*shards)
    for actual, expected in (
        (torch.cat(outputs, 2), out.detach()),
        (torch.cat(input_gradients, 3), x.grad),
        (sum(projection_gradients), projection.grad),
    ):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max())


def tokens(shards, dtype):
    generator = torch.Generator().manual_seed(1)
    shape = (2, 4, shards * TOKENS, 3)
    x = torch.randn(shape, generator=generator).to(dtype)
    return x.requires_grad_(), torch.randn(shape, generator=generator).to(dtype)


def previous_tokens_and_gradients(shards, dtype, count):
    with cpu_mesh(context=shards) as mesh:
        x, weights = (part.chunk(shards, 2)[mesh.cp.rank].detach() for part in tokens(shards, dtype))
        x.requires_grad_()
        before = mesh.new_cp_shard().previous_tokens(x, count)
        (before * weights[:, :, :count]).sum().backward()
        return before.detach(), x.grad


@pytest.mark.parametrize("count", [1, TOKENS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shards", SIZES)
def test_previous_tokens_are_the_last_tokens_of_the_left_neighbor(shards, dtype, count):
    x, weights = tokens(shards, dtype)
    padded = torch.cat([x.new_zeros(2, 4, count, 3), x], 2)
    expected = [padded[:, :, cp_shard * TOKENS :][:, :, :count] for cp_shard in range(shards)]
    loss = sum((e * w[:, :, :count]).sum() for e, w in zip(expected, weights.chunk(shards, 2)))
    loss.backward()
    for cp_shard, (before, grad) in enumerate(
        run_ranks(previous_tokens_and_gradients, shards, shards, dtype, count)
    ):
        assert_close(before, expected[cp_shard].detach(), dtype)
        assert_close(grad, x.grad.chunk(shards, 2)[cp_shard], dtype)


def swap_and_return(shards, dtype):
    with cpu_mesh(context=shards) as mesh:
        cp_shard, rank = mesh.new_cp_shard(), mesh.cp.rank
        x, weights = tokens(shards, dtype)
        own = x.chunk(shards, 2)[rank].detach().requires_grad_()
        heads = cp_shard.tokens_to_heads(own)
        back = cp_shard.heads_to_tokens(heads * weights.chunk(shards, 1)[rank])
        (back * back).sum().backward()
        return heads.detach(), back.detach(), own.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shards", SIZES)
def test_tokens_to_heads_and_back_gives_the_same_numbers_and_gradients(shards, dtype):
    x, weights = tokens(shards, dtype)
    y = x * weights
    (y * y).sum().backward()
    for rank, (heads, back, grad) in enumerate(run_ranks(swap_and_return, shards, shards, dtype)):
        assert_close(heads, x.chunk(shards, 1)[rank].detach(), dtype)
        assert_close(back, y.chunk(shards, 2)[rank].detach(), dtype)
        assert_close(grad, x.grad.chunk(shards, 2)[rank], dtype)


def bytes_left_by_steps(sections):
    """Bytes of tensors that are alive after each of four steps of a run."""
    from benchmarks.real_runs import random_batch

    config, left = trees.config(**sections), []
    with cpu_mesh(**sections["parallel"]) as mesh, Ledger() as ledger:
        engine = Engine(config, model_settings(config, mesh, 384))
        batches = [random_batch(config, 384, mesh)] * engine.micro_batches
        for _ in range(4):
            engine.train_step(batches, 1e-3)
            left.append(ledger.live_bytes)
    return left


RECOMPUTED = [("gather", "none"), ("gather", "full"), ("ring", "none"), ("ring", "full")]


@pytest.mark.second
@pytest.mark.parametrize(("method", "recompute"), RECOMPUTED)
def test_a_step_with_context_ranks_leaves_no_tensors_behind(method, recompute):
    """An exchange that held its own output kept the graph of every layer and step for good."""
    sections = {
        "model": {"num_layers": 2, "attention": "flurka"},
        "training": {"seq_len": 256, "global_batch_size": 2, "activation_checkpointing": recompute},
        "parallel": {"context": 2, "state_exchange": method},
    }
    for left in run_ranks(bytes_left_by_steps, 2, sections):
        # A thread of gloo may hold the scalar of the last message a moment longer; a graph takes megabytes.
        assert max(left[1:]) - min(left[1:]) <= 64, left


def shard_count():
    with cpu_mesh() as mesh:
        return mesh.new_cp_shard().size


def test_without_context_parallelism_a_sequence_has_one_shard():
    assert run_ranks(shard_count, 1) == [1]


def test_shards_of_a_machine_gather_through_all_of_its_adapters():
    """Eight times as fast as through one, so that only the memory for the gathered states limits them."""
    choose, state = exchange_method.choose_method, 16 * 128 * 129 * 4
    sizes = [state * share / 8 for share in range(1, 400)]
    for shards in (8, 16, 32):
        gathered = [max(x for x in sizes if choose(shards, x, each) == "gather") for each in (1, 2, 8)]
        assert gathered[0] < gathered[1] < gathered[2]
        assert gathered[2] == pytest.approx(exchange_method.MAX_GATHERED_BYTES / shards, rel=0.05)
    assert choose(16, 6 * state) == choose(16, 20 * state, 8) == "ring"
    assert choose(16, 6 * state, 8) == "gather"
    # On a single machine, a ring passes states on over its links, too.
    assert choose(4, 24 * state, 4) == "ring"
    assert choose(4, 24 * state, 2) == "gather"


def test_the_machine_with_the_fewest_shards_counts():
    count = exchange_method.shards_per_machine
    assert count(range(8), 8) == 8
    assert count(range(12), 8) == 4
    assert count(range(0, 16, 2), 8) == 4, "two tensor ranks"
    assert count(range(0, 64, 8), 8) == count(range(4), 1) == 1


def shards_on_a_machine(local_world_sizes):
    process = this_process()
    process = replace(process, local_world_size=local_world_sizes[process.rank])
    mesh = Mesh.create(Parallel(context=4), process, prepare_device("cpu", 0))
    try:
        return mesh.new_cp_shard()._per_machine
    finally:
        mesh.destroy()


@pytest.mark.parametrize(("local_world_sizes", "expected"), [((4, 4, 4, 4), 4), ((3, 3, 3, 1), 1)], ids=str)
def test_all_shards_choose_with_the_same_number_of_shards_on_a_machine(local_world_sizes, expected):
    """Machines may have different numbers of processes; shards that choose differently would wait for each other."""
    assert run_ranks(shards_on_a_machine, 4, local_world_sizes) == [expected] * 4


def test_large_states_and_many_shards_use_the_ring():
    state = 16 * 128 * 129 * 4  # one sequence, 16 key heads, F = D = 128
    assert [exchange_method.choose_method(8, size) for size in (100, state, 8 * state)] == [
        "gather",
        "gather",
        "ring",
    ]
    assert [exchange_method.choose_method(shards, state) for shards in (2, 64, 1024)] == [
        "gather",
        "gather",
        "ring",
    ]
