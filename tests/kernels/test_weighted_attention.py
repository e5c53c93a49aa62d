"""The kernels of weighted attention against its float64 reference."""

from functools import partial

import pytest
import torch
from torch import Tensor

import megakernel.ops.weighted_attention.triton  # noqa: F401 -- registers the operators
from megakernel.ops.weighted_attention import WeightedState, weighted_attention
from tests.kernels.comparing import (
    TOLERANCE,
    assert_agrees,
    every_dtype,
    rms_ratio,
)
from tests.tiers import tiered
from tests.unit.ops.cases import KINDS


def tokens(
    draw: torch.Generator,
    device: torch.device,
    dtype: torch.dtype,
    *,
    keys: int = 2,
    length: int = 100,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 1,
    width: int = 12,
    values: int = 10,
    scale: float = 1.0,
) -> dict[str, Tensor]:
    """q, k, v and a weight of every key."""
    shapes = {
        "q": (batch, heads, length, width),
        "k": (batch, kv_heads, keys, length, width),
        "v": (batch, kv_heads, length, values),
    }
    leaves = {
        name: (scale * torch.randn(shape, generator=draw)).to(device, dtype) for name, shape in shapes.items()
    }
    key_weights = torch.rand(shapes["k"][:-1], generator=draw) + 0.2
    return {**leaves, "key_weights": key_weights.to(device)}


def tokens_apart(draw: torch.Generator, *sizes, similarity: str, **more) -> dict[str, Tensor]:
    """`tokens` for join="max" with two keys whose weights differ enough that float32 rounding cannot swap them.

    The gradient goes to the larger of the two only; one draw in several hundred had a pair that was too close.
    """
    while True:
        leaves = tokens(draw, *sizes, **more)
        q, k, key_weights = (leaves[name].double() for name in ("q", "k", "key_weights"))
        q, k, key_weights = (
            q.unflatten(1, (k.shape[1], -1))[:, :, :, :, None],
            k[:, :, :, None, None],
            key_weights.log(),
        )
        scores = [
            (q * k[:, :, r]).sum(-1) if similarity == "softmax" else -(q - k[:, :, r]).square().sum(-1) / 2
            for r in range(2)
        ]
        root = q.shape[-1] ** 0.5
        first, second = (scores[r] / root + key_weights[:, :, r, None, None] for r in range(2))
        if (first - second).abs().min() > 1e-5:
            return leaves


def run(backend: str, leaves: dict[str, Tensor], **options) -> dict[str, Tensor]:
    q, k, v, key_weights = (leaves[name] for name in ("q", "k", "v", "key_weights"))
    return {"out": weighted_attention(q, k, v, key_weights=key_weights, backend=backend, **options)[0]}


def packed(lengths: list[int], device: torch.device) -> Tensor:
    """Positions of one sequence of documents."""
    return torch.cat([torch.arange(length) for length in lengths])[None].to(device)


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@every_dtype
def test_every_form_agrees(kind, causal, dtype, draw, device):
    make = tokens
    if KINDS[kind].get("join") == "max":
        make = partial(tokens_apart, similarity=KINDS[kind]["similarity"])
    leaves = make(draw, device, dtype)
    assert_agrees(partial(run, causal=causal, **KINDS[kind]), leaves, draw, TOLERANCE[dtype])


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@every_dtype
def test_documents_and_shared_keys_agree(causal, dtype, draw, device):
    leaves = tokens(draw, device, dtype, batch=2, heads=4, kv_heads=2, keys=1, length=150)
    # Documents end inside tiles and at tile edges; the first document of the second sequence began before it.
    rows = [packed([3, 61, 64, 1, 21], device), packed([128, 22], device)]
    rows[1][:, :128] += 9
    assert_agrees(partial(run, causal=causal, positions=torch.cat(rows)), leaves, draw, TOLERANCE[dtype])


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("length", tiered([1, 17, 64, 300, 500], [1, 17, 64, 300]))
@every_dtype
def test_any_length_agrees(length, dtype, draw, device):
    leaves = tokens(draw, device, dtype, length=length, heads=1, keys=1, width=8, values=8)
    options = {"normalize": length > 1}  # a single key has weight 1 and no gradient
    if length == 500:
        # Packed, with documents of many sizes.
        options["positions"] = packed([1, 90, 5, 130, 64, 10, 200], device)

    def attend(backend: str, kept: dict[str, Tensor]) -> dict[str, Tensor]:
        # The chunked op in float64 agrees with the reference, which would need too much memory: see the op's tests.
        return run("chunked" if backend == "reference" and length > 100 else backend, kept, **options)

    assert_agrees(attend, leaves, draw, TOLERANCE[dtype])


@pytest.mark.parametrize("keys", [1, 3, 4])
def test_any_number_of_keys_agrees(keys, draw, device):
    leaves = tokens(draw, device, torch.float32, keys=keys, length=70)
    assert_agrees(partial(run, similarity="gaussian"), leaves, draw, TOLERANCE[torch.float32])


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("keys", [1, 2])
@pytest.mark.parametrize("width", [64, 128])
@every_dtype
def test_common_head_widths_agree(keys, width, dtype, draw, device):
    leaves = tokens(draw, device, dtype, keys=keys, length=130, heads=1, width=width, values=width, scale=0.5)
    assert_agrees(partial(run, similarity="gaussian"), leaves, draw, TOLERANCE[dtype])


@pytest.mark.covering(1)
@pytest.mark.parametrize("join", ["sum", "max"])
@pytest.mark.parametrize("normalize", [True, False])
def test_keys_of_weight_0_do_not_count(join, normalize, draw, device):
    make = partial(tokens_apart, similarity="gaussian") if join == "max" else tokens
    leaves = make(draw, device, torch.float32, length=70)
    exists = torch.rand(leaves["key_weights"].shape, generator=draw) > 0.4
    exists[..., :9] = False  # the first queries see nothing
    exists = exists.to(device)

    def attend(backend: str, kept: dict[str, Tensor]) -> dict[str, Tensor]:
        return run(
            backend, {**kept, "key_weights": kept["key_weights"] * exists}, join=join, normalize=normalize
        )

    assert_agrees(attend, leaves, draw, TOLERANCE[torch.float32])
    assert not attend("triton", leaves)["out"][:, :, :9].any()


def test_equal_keys_share_the_gradient_of_the_largest(draw, device):
    leaves = tokens(draw, device, torch.float32, length=40)
    leaves["k"] = leaves["k"][:, :, :1].repeat(1, 1, 2, 1, 1)
    leaves["key_weights"] = torch.ones_like(leaves["key_weights"])
    assert_agrees(partial(run, join="max"), leaves, draw, TOLERANCE[torch.float32])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_a_cache_enters_and_gets_gradients(causal, draw, device):
    leaves = tokens(draw, device, torch.float32, length=90)
    cached = 70

    def attend(backend: str, kept: dict[str, Tensor]) -> dict[str, Tensor]:
        k, v = kept["k"], kept["v"]
        state = WeightedState(k[..., :cached, :], v[:, :, :cached])
        new = {**kept, "q": kept["q"][:, :, cached:], "k": k[..., cached:, :], "v": v[:, :, cached:]}
        # The document began inside the cache: the first 30 cached keys belong to another one and are invisible.
        return run(backend, new, causal=causal, positions=40, initial_state=state)

    assert_agrees(attend, leaves, draw, TOLERANCE[torch.float32])


@pytest.mark.parametrize("similarity", ["softmax", "gaussian"])
def test_inputs_of_scale_10_in_half_precision_stay_close(similarity, draw, device):
    leaves = tokens(draw, device, torch.bfloat16, length=300, width=64, heads=1, scale=10.0)
    fast = run("triton", leaves, similarity=similarity)["out"]
    exact = run("chunked", {name: x.double() for name, x in leaves.items()}, similarity=similarity)["out"]
    # bfloat16 outputs alone are off by 2e-3.
    assert rms_ratio(fast, exact) < 2e-2


def test_an_offset_of_queries_and_keys_costs_no_precision(draw, device):
    leaves = tokens(draw, device, torch.bfloat16, length=70)
    for name in "qk":
        leaves[name] = (leaves[name] / 2 + 16).bfloat16()
    assert_agrees(partial(run, similarity="gaussian"), leaves, draw, TOLERANCE[torch.bfloat16])


def test_distant_keys_do_not_underflow(draw, device):
    leaves = tokens(draw, device, torch.float32, length=40)
    leaves["q"] += 100
    ones = torch.ones_like(leaves["v"])
    out = run("triton", {**leaves, "v": ones}, similarity="gaussian")["out"]
    torch.testing.assert_close(out, ones.expand_as(out))


def test_transposed_inputs_change_nothing(draw, device):
    leaves = tokens(draw, device, torch.float32, length=70, heads=4, kv_heads=2)
    moved = {name: x.transpose(1, -2).contiguous().transpose(1, -2) for name, x in leaves.items()}
    assert not moved["k"].is_contiguous()
    assert torch.equal(run("triton", moved)["out"], run("triton", leaves)["out"])


def test_the_operators_pass_opcheck(draw, device):
    leaves = tokens(draw, device, torch.float32, length=20)
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    places = torch.arange(20, dtype=torch.int32, device=device)[None]
    options = ("gaussian", [1.0, 0.5], "sum", True)
    torch.library.opcheck(
        torch.ops.megakernel.weighted_attention.default,
        (*leaves.values(), torch.zeros_like(places), places, *options),
        test_utils=(
            "test_schema",
            "test_autograd_registration",
            "test_faketensor",
            "test_aot_dispatch_static",
        ),
    )
    out, of_queries = torch.ops.megakernel.weighted_attention(
        *leaves.values(), torch.zeros_like(places), places, *options
    )
    torch.library.opcheck(
        torch.ops.megakernel.weighted_attention_backward.default,
        (
            *(x.detach() for x in (out, *leaves.values())),
            *(torch.zeros_like(places), places, out.detach(), of_queries, *options),
        ),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float64}, "q is torch.float64; expected float32, bfloat16 or float16"),
        ({"width": 257}, "q is 257 wide; expected at most 256"),
        ({"values": 300}, "v is 300 wide; expected at most 256"),
        ({"keys": 5}, "k has 5 keys at a position; expected at most 4"),
    ],
)
def test_unsupported_inputs_are_refused_with_a_reason(changes, message, draw, device):
    leaves = tokens(draw, device, length=8, **{"dtype": torch.float32, **changes})
    with pytest.raises(ValueError, match=message):
        run("triton", leaves)
