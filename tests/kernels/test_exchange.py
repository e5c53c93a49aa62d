"""Shards of a sequence that exchange states give the results of the whole sequence, and run every kernel once."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megakernel.attention import Rotary
from megakernel.ops.documents import Positions
from megakernel.ops.flurka_attention import flurka_attention, triton
from megakernel.ops.flurka_attention import tiles as flurka_tiles
from megakernel.ops.flurka_attention import triton as flurka_triton
from megakernel.ops.flurka_attention.options import FlurkaState
from megakernel.ops.kernel_attention import kernel_attention, tiles
from megakernel.ops.kernel_attention import triton as kernel_triton
from megakernel.ops.kernels.launch import Launch, record_launches
from megakernel.ops.state import Exchange, KernelState, empty_state, keep, merge
from megakernel.ops.window import Tail
from tests.kernels.comparing import TOLERANCE, assert_agrees
from tests.kernels.test_flurka_attention import BLOCK, VARIANTS, documents
from tests.kernels.test_flurka_attention import tokens as flurka_tokens
from tests.kernels.test_kernel_attention import tokens
from tests.tiers import tiered

Leaves = dict[str, Tensor]

LENGTH, END = 68, 32
"""Tokens of a sequence, and of its first shard: two blocks. Documents of the second shard see landmarks, too."""

REACH = 32
"""Tokens that a shard has of its left neighbor: two blocks."""

PER_TOKEN = ("q", "k", "v", "gate", "key_weights", "log_decay")


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    """Segments so short that shards have several, and fewer queries computed ahead than the second shard has."""
    monkeypatch.setattr(tiles, "segment_length", lambda phi, q, v, causal: 16)
    monkeypatch.setattr(triton, "segment_blocks", lambda *_: 1)
    monkeypatch.setattr(flurka_tiles, "QUERIES_AHEAD", 4 * 32)


class Handed:
    """A received state."""

    def __init__(self, state: KernelState):
        self.state = state

    def wait(self) -> KernelState:
        return self.state


class Chain:
    """The exchange of consecutive shards that run one after the other."""

    def __init__(self) -> None:
        self.leaving: KernelState | None = None

    def __call__(self, own: KernelState, carries: Tensor) -> Handed:
        entering = empty_state(own) if self.leaving is None else self.leaving
        self.leaving = merge(keep(entering, carries), own)
        return Handed(entering)


Attend = Callable[[Leaves, Positions, Tail | None, Exchange | None], tuple[Tensor, KernelState]]
"""(tensors, positions, tail, exchange) -> output, and the outgoing state, or with an exchange the added one."""


def kernel(backend: str, feature_map: str) -> Attend:
    def attend(here, positions, tail, exchange):
        options = {"feature_map": feature_map, "backend": backend, "return_state": True}
        return kernel_attention(**here, positions=positions, exchange=exchange, **options)

    return attend


def flurka(backend: str, feature_map: str, near: str, blocks: int) -> Attend:
    def attend(here, positions, tail, exchange):
        options = {"feature_map": feature_map, "near": near, "blocks": blocks, "rotary": Rotary(12)}
        if tail is not None:
            options["initial_state"] = FlurkaState(None, Tail(*(x[:, :, -BLOCK * blocks :] for x in tail)))
        out, state = flurka_attention(
            **here, positions=positions, exchange=exchange, backend=backend, **options
        )
        return out, state.far

    return attend


def in_shards(attend: Attend, leaves: Leaves, positions: Positions) -> Leaves:
    """Outputs of both shards, the second with its left neighbor's last tokens, and the outgoing state."""
    chain, outputs = Chain(), []
    k, v = leaves["k"], leaves["v"]
    for begin, end in ((0, END), (END, LENGTH)):
        here = {name: x[:, :, begin:end] if name in PER_TOKEN else x for name, x in leaves.items()}
        at = positions + begin if isinstance(positions, int) else positions[:, begin:end]
        before = [
            x[:, :, begin - REACH : begin] if begin else torch.zeros_like(x[:, :, :REACH]) for x in (k, v)
        ]
        outputs.append(attend(here, at, Tail(*before), chain)[0])
    return found(torch.cat(outputs, 2), chain.leaving)


def in_one_shard(attend: Attend, leaves: Leaves) -> Tensor:
    """Outputs of a sequence that is a single shard."""
    before = [torch.zeros_like(leaves[name][:, :, :REACH]) for name in "kv"]
    return attend(leaves, 0, Tail(*before), Chain())[0]


def found(out: Tensor, state: KernelState) -> Leaves:
    sums = state.sums * state.log_scale.exp()[..., None, None]
    # Without a complete block, the state is 0.
    return {"out": out, "state": sums} if sums.any() else {"out": out}


def halves(make: Callable[[str], Attend], positions: Positions, backend: str, leaves: Leaves) -> Leaves:
    """The whole sequence with the reference, or two shards with the kernels."""
    if backend == "triton":
        return in_shards(make(backend), leaves, positions)
    return found(*make(backend)(leaves, positions, None, None))


POSITIONS = {
    "one document": 0,
    "packed": documents(torch.device("cpu"), 0, 7, 56, LENGTH),
    "a document begins with the shard": documents(torch.device("cpu"), 0, END, LENGTH),
}
every_position = pytest.mark.parametrize("positions", POSITIONS)


def places(name: str, device: torch.device) -> Positions:
    at = POSITIONS[name]
    return at if isinstance(at, int) else at.to(device)


@pytest.mark.covering(1, 1)
@every_position
@pytest.mark.parametrize("feature_map", ["elu", "hedgehog", "favor"])
def test_shards_of_kernel_attention_give_the_whole_sequence(feature_map, positions, draw, device):
    leaves = tokens(draw, device, torch.float32, feature_map=feature_map, length=LENGTH, heads=4, kv_heads=2)
    leaves["key_weights"] = torch.rand(1, 2, LENGTH, generator=draw).to(device) + 0.1
    run = partial(halves, partial(kernel, feature_map=feature_map), places(positions, device))
    assert_agrees(run, leaves, draw, TOLERANCE[torch.float32])


SHARDS = [
    ("gated", "hedgehog", "one document"),
    ("gated", "favor", "packed"),
    ("shared", "hedgehog", "packed"),
    ("shared", "favor", "a document begins with the shard"),
    ("kernel", "hedgehog", "a document begins with the shard"),
    ("kernel", "favor", "one document"),
]


@pytest.mark.parametrize(("variant", "feature_map", "positions"), tiered(SHARDS, SHARDS[:1]))
def test_shards_of_flurka_give_the_whole_sequence(feature_map, variant, positions, draw, device):
    leaves = flurka_tokens(
        draw,
        device,
        variant=variant,
        feature_map=feature_map,
        length=LENGTH,
        heads=4,
        kv_heads=2,
        per_head=True,
    )
    # Learned landmark token counts per head, also with a gate.
    leaves.setdefault("far_mass", 0.3 * torch.randn(2, generator=draw).to(device))
    blocks = 2 if feature_map == "hedgehog" else 1
    make = partial(flurka, feature_map=feature_map, near=VARIANTS[variant][0], blocks=blocks)
    assert_agrees(partial(halves, make, places(positions, device)), leaves, draw, TOLERANCE[torch.float32])


@pytest.mark.second
@pytest.mark.covering(1, 1)
@every_position
@pytest.mark.parametrize(("variant", "feature_map"), [("gated", "hedgehog"), ("shared", "favor")])
def test_shards_of_flurka_that_decays_give_the_whole_sequence(feature_map, variant, positions, draw, device):
    sizes = {"length": LENGTH, "heads": 4, "kv_heads": 2}
    leaves = flurka_tokens(draw, device, variant=variant, feature_map=feature_map, decays=True, **sizes)
    make = partial(flurka, feature_map=feature_map, near="softmax", blocks=1)
    assert_agrees(partial(halves, make, places(positions, device)), leaves, draw, TOLERANCE[torch.float32])


class CountLaunches(torch.autograd.Function):
    """Records how many launches there have been so far, in forward and in backward."""

    @staticmethod
    def forward(ctx, sums: Tensor, counts: list[int], launches: list[Launch]) -> Tensor:
        ctx.counts, ctx.launches = counts, launches
        counts.append(len(launches))
        return sums.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.counts.append(len(ctx.launches))
        return grad.clone(), None, None


KERNEL_LEAVES = partial(tokens, dtype=torch.float32, feature_map="hedgehog", heads=4, kv_heads=2)
FLURKA_LEAVES = partial(flurka_tokens, heads=4, kv_heads=2)


@pytest.mark.parametrize(
    ("make", "draw_leaves", "parts"),
    [
        (
            partial(kernel, feature_map="hedgehog"),
            KERNEL_LEAVES,
            (
                ["write_keys", "pass_states"],
                [],
                ["pass_states", "read"],
                ["bwd_dq", "write_queries", "pass_states"],
                [],
                ["pass_states", "bwd_dkv"],
            ),
        ),
        (
            partial(flurka, feature_map="hedgehog", near="softmax", blocks=2),
            FLURKA_LEAVES,
            (
                ["pool", "write_keys", "pass_states"],
                ["window_forward"],
                ["pass_states", "merge"],
                ["merge_backward", "write_queries", "pass_states"],
                ["window_dq"],
                ["pass_states", "bwd_dkv", "window_backward", "pool_backward"],
            ),
        ),
    ],
    ids=["kernel_attention", "flurka"],
)
def test_kernels_launch_before_during_and_after_the_exchange(make, draw_leaves, parts, draw, device):
    leaves = {name: x.requires_grad_() for name, x in draw_leaves(draw, device, length=LENGTH).items()}
    counts: list[int] = []
    with record_launches() as made:

        class CountingExchange:
            def __init__(self, own: KernelState, carries: Tensor):
                self.own = own._replace(sums=CountLaunches.apply(own.sums, counts, made))

            def wait(self) -> KernelState:
                return self.own._replace(sums=CountLaunches.apply(self.own.sums, counts, made))

        out, _ = make("triton")(
            leaves, REACH, Tail(*(leaves[name][:, :, :REACH] for name in "kv")), CountingExchange
        )
        counts.append(len(made))
        out.backward(torch.empty_like(out))
    names = [launch.kernel.__name__ for launch in made]
    bounds = [0, *counts, len(names)]
    assert tuple(names[begin:end] for begin, end in pairwise(bounds)) == parts


AHEAD = [
    ("gated", "hedgehog", torch.bfloat16, "packed"),
    ("gated", "favor", torch.float32, "one document"),
    ("shared", "hedgehog", torch.bfloat16, "a document begins with the shard"),
    ("shared", "favor", torch.bfloat16, "packed"),
    ("kernel", "hedgehog", torch.bfloat16, "packed"),
    ("kernel", "favor", torch.float32, "packed"),
]


@pytest.mark.parametrize(("variant", "feature_map", "dtype", "positions"), tiered(AHEAD, AHEAD[:1]))
def test_windows_that_are_computed_ahead_change_no_bit(
    variant, feature_map, dtype, positions, draw, device, monkeypatch
):
    sizes = {"length": LENGTH, "heads": 4, "kv_heads": 2}
    leaves = flurka_tokens(draw, device, dtype, variant=variant, feature_map=feature_map, **sizes)
    if "gate" in leaves:
        leaves["gate"] = leaves["gate"].to(dtype)
    attend = flurka("triton", feature_map, VARIANTS[variant][0], 2 if feature_map == "hedgehog" else 1)
    outputs, gradients = [], []
    for ahead in (0, 4 * 32, 4 * LENGTH):
        monkeypatch.setattr(flurka_tiles, "QUERIES_AHEAD", ahead)
        inputs = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
        found = in_shards(attend, inputs, places(positions, device))
        sum(x.float().square().sum() for x in found.values()).backward()
        outputs.append(found)
        gradients.append({name: x.grad for name, x in inputs.items()})
    for some in (outputs, gradients):
        for name, x in some[0].items():
            assert all(torch.equal(x, other[name]) for other in some[1:]), name


def test_a_query_that_is_also_used_elsewhere_gets_its_whole_gradient(draw, device):
    """Part of the gradient is added late, in place; autograd must not have summed it before."""
    leaves = FLURKA_LEAVES(draw, device, length=40)
    attend = flurka("triton", "hedgehog", "softmax", 1)
    grads = []
    for used in (False, True):
        q = leaves["q"].detach().clone().requires_grad_()
        out = in_one_shard(attend, leaves | {"q": q})
        (out.sum() + (3 * q.sum() if used else 0.0)).backward()
        grads.append(q.grad)
    torch.testing.assert_close(grads[1], grads[0] + 3)


def test_projection_gradients_of_queries_are_computed_during_the_exchange(draw, device):
    leaves = {name: x.requires_grad_() for name, x in KERNEL_LEAVES(draw, device, length=40).items()}
    events: list[str] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket.__name__ == "bmm":
                events.append("product")
            return function(*args, **(kwargs or {}))

    class Waiting:
        def __init__(self, own: KernelState, carries: Tensor):
            self.sums, self.log_scale = own.sums.clone(), own.log_scale
            self.sums.register_hook(lambda grad: events.append("end"))

        def wait(self) -> KernelState:
            sums = self.sums * 1.0
            sums.register_hook(lambda grad: events.append("start"))
            return KernelState(sums, self.log_scale)

    with record_launches():
        out, _ = kernel("triton", "hedgehog")(leaves, 7, None, Waiting)
        with Products():
            out.backward(torch.empty_like(out))
    assert events == ["start", "product", "end", "product"]


@pytest.mark.second
@pytest.mark.parametrize("op", ["kernel_attention", "flurka"])
def test_queries_that_underflow_after_an_exchange_are_recomputed(op, draw, device, monkeypatch):
    if op == "flurka":
        leaves, module = FLURKA_LEAVES(draw, device, feature_map="favor", length=LENGTH), flurka_triton
        make = partial(flurka, feature_map="favor", near="softmax", blocks=1)
    else:
        leaves, module = KERNEL_LEAVES(draw, device, length=LENGTH), kernel_triton
        make = partial(kernel, feature_map="favor")
    # No feature is large in both queries and keys: weights are exp(-64) times the largest features.
    leaves["projection"] = (6 * torch.eye(12)).expand(2, -1, -1).to(device)
    for name, axis in (("q", 0), ("k", 1)):
        leaves[name] = 0.1 * leaves[name]
        leaves[name][..., axis] += 20
    wide: list[torch.dtype] = []
    chunked = module.chunked.attend

    def attend(q: Tensor, *rest, **options):
        wide.append(q.dtype)
        return chunked(q, *rest, **options)

    monkeypatch.setattr(module, "chunked", SimpleNamespace(attend=attend))
    # Exponents of 64 and more have rounding errors of 2^-18.
    assert_agrees(partial(halves, make, 0), leaves, draw, 1e-4)
    assert wide == [torch.float64] * 2


@pytest.mark.parametrize("op", ["kernel_attention", "flurka"])
def test_an_outgoing_state_has_gradients_without_an_output(op, draw, device):
    if op == "flurka":
        leaves = FLURKA_LEAVES(draw, device, length=40)
        make = partial(flurka, feature_map="hedgehog", near="softmax", blocks=1)
    else:
        leaves = KERNEL_LEAVES(draw, device, length=40)
        make = partial(kernel, feature_map="hedgehog")

    def run(backend: str, leaves: Leaves) -> Leaves:
        _, state = make(backend)(leaves, 0, None, Chain() if backend == "triton" else None)
        return {"state": found(state.sums, state)["state"]}

    assert_agrees(run, leaves, draw, TOLERANCE[torch.float32])
