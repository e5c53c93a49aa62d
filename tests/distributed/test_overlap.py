"""The order of exchanges between ranks and of the work that they overlap with."""

from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megakernel.model.layer import TransformerLayer
from megakernel.ops.flurka_attention import flurka_attention
from megakernel.ops.flurka_attention.options import FlurkaState
from megakernel.ops.window import Tail
from megakernel.parallel import state_exchange
from tests.distributed.processes import cpu_mesh, run_ranks
from tests.distributed.test_guards import trainer
from tests.distributed.training_run import layout, write_config
from tests.tiers import tiered

HEADS, TOKENS, WIDTH, BLOCK, RANK = 2, 32, 8, 8, 2

POSITIONS = {
    "one document": torch.arange(2 * TOKENS),
    # The second begins in the first shard and ends in the second one.
    "packed": torch.cat([torch.arange(20), torch.arange(25), torch.arange(2 * TOKENS - 45)]),
}


def recorded(events: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which adds `name` to the events before it runs."""

    @wraps(function)
    def record(*args: Any, **options: Any) -> Any:
        events.append(name)
        return function(*args, **options)

    return record


def record_exchanges(events: list[str]) -> None:
    """Record when exchanges of states start and when they are awaited."""
    for kind in (state_exchange.AllGather, state_exchange.PointToPoint):
        for name in ("start", "finish", "start_backward", "finish_backward"):
            short = name.removesuffix("_backward").replace("finish", "wait")
            setattr(kind, name, recorded(events, short, getattr(kind, name)))


def record_work(events: list[str]) -> None:
    """Record the kernels' launches, and the chunked op's passes over the tokens."""
    from megakernel.ops.flurka_attention import chunked
    from megakernel.ops.kernels import launcher

    launch = launcher.launch

    def launch_and_record(kernel: Any, *args: Any, **options: Any) -> None:
        events.append(kernel.__name__)
        launch(kernel, *args, **options)

    launcher.launch = launch_and_record
    for name in ("_write", "_sums", "_add_entering"):
        setattr(chunked, name, recorded(events, name, getattr(chunked, name)))
    softmax_pairs = chunked.softmax_pairs

    def pairs(*args: Any) -> Any:
        found = softmax_pairs(*args)
        if found.values.requires_grad:
            found.values.register_hook(lambda grad: events.append("backward of the window"))
        return found

    chunked.softmax_pairs = pairs


def leaves() -> dict[str, Tensor]:
    """Tokens of both shards, and parameters."""
    draw = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    tokens = {name: normal(1, HEADS, 2 * TOKENS, WIDTH) for name in "qkv"}
    pools = {name: normal(RANK, BLOCK).softmax(-1) for name in ("pool_keys", "pool_values")}
    return {
        **tokens,
        **pools,
        "projection": normal(HEADS, WIDTH, WIDTH),
        "gate": normal(1, HEADS, 2 * TOKENS),
        "gate_weight": normal(HEADS, WIDTH),
    }


def attend(x: dict[str, Tensor], positions: Tensor, backend: str, mesh: Any) -> Tensor:
    """FLuRKA of this rank's shard."""
    shard = mesh.new_cp_shard()
    tail = Tail(*(shard.previous_tokens(x[name], BLOCK) for name in "kv"))
    out, _ = flurka_attention(
        **x,
        feature_map="hedgehog",
        near="softmax",
        positions=positions,
        initial_state=FlurkaState(None, tail),
        exchange=shard.start_prefix,
        backend=backend,
    )
    return out


def run_shard(
    backend: str, method: str, how: str, packed: str, ahead: int | None
) -> tuple[list[str], list[Tensor]]:
    """The order of events of forward and backward on this rank; its output and gradients."""
    from megakernel.ops.flurka_attention import tiles

    events: list[str] = []
    if ahead is not None:
        tiles.QUERIES_AHEAD = ahead
    with cpu_mesh(context=2, state_exchange=method) as mesh:
        record_exchanges(events)
        record_work(events)
        x = {
            name: (whole.chunk(2, 2)[mesh.cp.rank] if name in ("q", "k", "v", "gate") else whole)
            .clone()
            .requires_grad_()
            for name, whole in leaves().items()
        }
        positions = POSITIONS[packed].chunk(2)[mesh.cp.rank][None]
        run = partial(attend, positions=positions, backend=backend, mesh=mesh)
        if how == "recomputed":
            out = checkpoint(run, x, use_reentrant=False)
        elif how == "compiled":
            # Without a compiler for the graphs: what is shown is that tracing keeps the order.
            out = torch.compile(run, backend="eager")(x)
        else:
            out = run(x)
        events.append("backward")
        out.square().sum().backward()
    return events, [out.detach(), *(leaf.grad for leaf in x.values())]


def during(events: list[str]) -> list[list[str]]:
    """What lies between the start of each exchange and its end."""
    begins = [index for index, name in enumerate(events) if name == "start"]
    return [events[begin + 1 : events.index("wait", begin)] for begin in begins]


WORK = {
    "triton": ("window_forward", "window_dq"),
    "chunked": ("_sums", "backward of the window"),
}
"""What runs during the exchange, in forward and in backward."""

CASES = [
    ("triton", "gather", "plain", "one document"),
    ("triton", "ring", "plain", "packed"),
    ("triton", "ring", "recomputed", "packed"),
    ("triton", "gather", "compiled", "one document"),
    ("chunked", "gather", "plain", "one document"),
    ("chunked", "ring", "recomputed", "packed"),
]


@pytest.mark.parametrize(("backend", "method", "how", "packed"), tiered(CASES, [CASES[0], CASES[4]]))
def test_windows_are_computed_while_states_and_their_gradients_are_exchanged(
    backend, method, how, packed, monkeypatch
):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    forward, backward = WORK[backend]
    passes = [forward, forward, backward] if how == "recomputed" else [forward, backward]
    found = run_ranks(run_shard, 2, backend, method, how, packed, None)
    # The same without overlap: the kernels then compute all windows when the state has arrived.
    expected = run_ranks(run_shard, 2, backend, method, "plain", packed, 0)
    for (events, tensors), (_, others) in zip(found, expected):
        assert during(events) == [[name] for name in passes], events
        assert all(map(torch.equal, tensors, others))


REDUCTIONS = ("c10d::allreduce_", "c10d::reduce_", "c10d::_reduce_scatter_base_")
GATHERS = ("c10d::_allgather_base_",)


def order_of_a_step(config: Path, overrides: tuple[str, ...], steps: int) -> list[str]:
    """Collectives, and forward and backward of transformer layers, in the order in which the last step starts them."""
    with trainer(config, overrides) as local:
        engine, batches = local.engine, local.batches.from_step(0)
        layers = [x for x in engine.engine.module.modules() if isinstance(x, TransformerLayer)]
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(mark, f"forward {index}"))
            layer.register_forward_hook(partial(mark_backward, f"backward {index}"))
        for _ in range(steps - 1):
            engine.train_step(next(batches), 1e-3)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            engine.train_step(next(batches), 1e-3)
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    wanted = (*REDUCTIONS, *GATHERS)
    return [x.name for x in events if x.name in wanted or x.name.startswith(("forward ", "backward "))]


def mark(name: str, *_: Any) -> None:
    """An event of the profiler."""
    with torch.profiler.record_function(name):
        pass


def mark_backward(name: str, layer: Any, inputs: Any, outputs: Any) -> None:
    """Mark when the gradient of a layer's output is complete, and its backward begins."""
    outputs[0].register_hook(lambda grad: mark(name))


def reductions_in_backward(events: list[str]) -> list[int]:
    """For each micro-batch, the reductions between the backward of the last layer and that of the first."""
    ends = [index for index, name in enumerate(events) if name == "backward 0"]
    starts = [index for index, name in enumerate(events) if name == "backward 3"]
    return [sum(x in REDUCTIONS for x in events[start:end]) for start, end in zip(starts, ends, strict=True)]


TWO_MICRO_BATCHES = ("training.global_batch_size=8", "training.micro_batch_size=2")
SMALL_BUCKETS = ("deepspeed.zero_optimization.reduce_bucket_size=30000",)
"""Gradients of a bucket: a transformer layer of the test's model has about twice as many."""

REDUCES = {
    "dp2 zero 1": (False, True),
    "dp2 zero 2 bfloat16": (True, True),
    "dp2 zero 3": (True, True),
    # One reduce-scatter of all sums, after the last micro-batch.
    "dp2 zero 1 bfloat16": (False, False),
}
"""Layout -> whether gradients are reduced during the backward of each micro-batch."""


@pytest.mark.parametrize("ranks", tiered(REDUCES, ["dp2 zero 1"]))
def test_gradients_are_reduced_in_buckets_during_backward(ranks, corpus, tmp_path):
    world_size, *keys = layout(ranks)
    overrides = (*keys, *TWO_MICRO_BATCHES, *SMALL_BUCKETS)
    for events in run_ranks(order_of_a_step, world_size, write_config(tmp_path, corpus), overrides, 1):
        assert tuple(count > 1 for count in reductions_in_backward(events)) == REDUCES[ranks], events


@pytest.mark.second
def test_weights_of_zero_3_are_gathered_before_the_layer_before_theirs_runs(corpus, tmp_path):
    """From the third step on, when DeepSpeed knows the order of layers; without its prefetch as each of them runs."""
    world_size, *keys = layout("dp2 zero 3")
    config = write_config(tmp_path, corpus)
    zero = "deepspeed.zero_optimization.stage3_"
    for numbers, prefetches in ((60_000, True), (0, False)):
        # Weights of few numbers are otherwise gathered once a step.
        options = (f"{zero}prefetch_bucket_size={numbers}", f"{zero}param_persistence_threshold=0")
        overrides = (*keys, *options, "training.global_batch_size=4", f"run.name=prefetch-{numbers}")
        for events in run_ranks(order_of_a_step, world_size, config, overrides, 3):
            between = events[events.index("forward 2") : events.index("forward 3")]
            assert (not any(x in GATHERS for x in between)) is prefetches, events


def order_of_sends(config: Path, overrides: tuple[str, ...]) -> list[str]:
    """When a stage starts to send a hidden state or its gradient, waits for that, and computes, in a training step."""
    events: list[str] = []
    isend = dist.isend

    class Recorded:
        def __init__(self, work: Any):
            self.work = work

        def wait(self) -> None:
            events.append("wait")
            self.work.wait()

    def record(tensor: Tensor, *args: Any) -> Any:
        work = isend(tensor, *args)
        if not tensor.is_floating_point() or tensor.dim() < 3:
            return work
        events.append("send")
        return Recorded(work)

    def record_backward(layer: Any, inputs: Any, outputs: Any) -> None:
        outputs[0].register_hook(lambda grad: events.append("backward"))

    with trainer(config, overrides) as local, pytest.MonkeyPatch.context() as patch:
        engine, batches = local.engine, local.batches.from_step(0)
        engine.train_step(next(batches), 1e-3)  # sends shapes first
        patch.setattr(dist, "isend", record)
        layer = next(x for x in engine.engine.module.modules() if isinstance(x, TransformerLayer))
        layer.register_forward_pre_hook(lambda *_: events.append("forward"))
        layer.register_forward_hook(record_backward)
        engine.train_step(next(batches), 1e-3)
    return events


@pytest.mark.second
def test_stages_compute_while_they_send(corpus, tmp_path):
    world_size, *keys = layout("pp2")
    config = write_config(tmp_path, corpus)
    first, last = run_ranks(order_of_sends, world_size, config, (*keys, "training.micro_batch_size=2"))
    # Four micro-batches in DeepSpeed's 1F1B order, of each stage's first layer.
    assert first == [
        *("forward", "send", "forward"),
        *(3 * ("wait", "send", "backward", "forward"))[:-1],
        *("wait", "backward"),
    ]
    assert last == [*(4 * ("wait", "forward", "backward", "send"))[1:], "wait"]
