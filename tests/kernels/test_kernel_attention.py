"""The kernels of kernel attention against its float64 reference."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megakernel.ops.feature_maps import FEATURE_MAPS
from megakernel.ops.flurka_attention import flurka_attention
from megakernel.ops.kernel_attention import kernel_attention, tiles, triton
from megakernel.ops.kernel_attention.triton import KernelKeyTensors, KernelQueryTensors, KernelStatic
from megakernel.ops.kernels import launch
from megakernel.ops.kernels.feature_maps import SUPPORTED
from megakernel.ops.kernels.launch import record_launches
from megakernel.ops.kernels.launcher import map_of_call
from megakernel.ops.simple_gla import simple_gla
from megakernel.ops.state import KernelState
from tests.kernels.comparing import (
    TOLERANCE,
    assert_agrees,
    every_dtype,
    rms_ratio,
)
from tests.tiers import tiered

every_map = pytest.mark.parametrize("feature_map", SUPPORTED)

PROJECTED = ("hedgehog", "favor", "prf", "rks")
SIGNED = ("identity", "rks")
"""Maps whose weights have both signs: denominators near 0 lose all digits."""


@pytest.fixture
def short_segments(monkeypatch):
    """Segments of 128 tokens with every map, so that short sequences have several."""
    monkeypatch.setattr(tiles, "segment_length", lambda phi, q, v, causal: 2 * tiles.MIN_SEGMENT)


def tokens(
    draw: torch.Generator,
    device: torch.device,
    dtype: torch.dtype,
    *,
    feature_map: str = "elu",
    length: int = 200,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 1,
    keys: int = 0,
    width: int = 12,
    values: int = 10,
    scale: float = 1.0,
) -> dict[str, Tensor]:
    """q, k, v and the map's projection, if any. keys: keys per position of a mixture, 0 for no mixture."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    leaves = {
        "q": normal(batch, heads, length, width),
        "k": normal(batch, kv_heads, *[keys] * (keys > 0), length, width),
        "v": normal(batch, kv_heads, length, values),
    }
    leaves = {name: (scale * x).to(device, dtype) for name, x in leaves.items()}
    if feature_map in PROJECTED:
        rows = width if feature_map == "hedgehog" else 9
        leaves["projection"] = (0.5 * normal(kv_heads, rows, width)).to(device)
    return leaves


def features_of(feature_map: str, leaves: dict[str, Tensor]) -> int:
    rows = leaves["projection"].shape[1] if "projection" in leaves else leaves["q"].shape[-1]
    return rows * FEATURE_MAPS[feature_map].halves


def some_state(feature_map: str, leaves: dict[str, Tensor], draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sums of a state with positive weights, and its log scales."""
    k, v = leaves["k"], leaves["v"]
    shape = (*k.shape[:2], features_of(feature_map, leaves), v.shape[-1] + 1)
    sums = torch.rand(shape, generator=draw).to(k.device)
    return sums, sums.new_full(shape[:2], 0.3 if FEATURE_MAPS[feature_map].unbounded else 0.0)


def run(backend: str, leaves: dict[str, Tensor], *, feature_map: str, **options) -> dict[str, Tensor]:
    """The output and, with return_state, the state as one tensor."""
    leaves = dict(leaves)
    q, k, v = (leaves.pop(name) for name in "qkv")
    sums, log_scale = leaves.pop("sums", None), options.pop("log_scale", None)
    if sums is not None:
        options["initial_state"] = KernelState(sums, log_scale.to(sums.dtype))
    out = kernel_attention(q, k, v, feature_map=feature_map, backend=backend, **leaves, **options)
    if not options.get("return_state"):
        return {"out": out}
    out, state = out
    return {"out": out, "state": state.sums * torch.exp(state.log_scale)[..., None, None]}


@pytest.mark.covering(1, 1)  # the mixtures below pair every map with every dtype
@pytest.mark.parametrize("feature_map", tiered(SUPPORTED, ["hedgehog", "favor"]))
@every_dtype
@pytest.mark.usefixtures("short_segments")
def test_documents_key_weights_states_and_shared_keys_agree(feature_map, dtype, draw, device):
    leaves = tokens(draw, device, dtype, feature_map=feature_map, heads=4, kv_heads=2, length=150)
    leaves["key_weights"] = torch.rand(1, 2, 150, generator=draw).to(device) + 0.1
    leaves["sums"], log_scale = some_state(feature_map, leaves, draw)
    # The first document continues the state; others start inside chunks, at chunk edges and at segment edges.
    starts = [0, 64, 67, 127, 128, 150]
    places = [torch.arange(b - a) + (5 if a == 0 else 0) for a, b in pairwise(starts)]
    options = {
        "feature_map": feature_map,
        "normalize": feature_map not in SIGNED,
        "log_scale": log_scale,
        "positions": torch.cat(places)[None].to(device),
        "return_state": True,
    }
    assert_agrees(partial(run, **options), leaves, draw, TOLERANCE[dtype])


@pytest.mark.covering(1, 1)
@every_map
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.usefixtures("short_segments")
def test_bidirectional_attention_agrees(feature_map, normalize, draw, device):
    if normalize and feature_map in SIGNED:
        normalize = False
    leaves = tokens(draw, device, torch.float32, feature_map=feature_map, length=130)
    leaves["sums"], log_scale = some_state(feature_map, leaves, draw)
    leaves["q"] = leaves["q"][:, :, :70]  # fewer queries than keys
    options = {"feature_map": feature_map, "causal": False, "normalize": normalize, "log_scale": log_scale}
    assert_agrees(partial(run, **options, return_state=True), leaves, draw, TOLERANCE[torch.float32])


@pytest.mark.covering(1)
@pytest.mark.parametrize("feature_map", tiered(SUPPORTED, ["hedgehog", "favor"]))
@pytest.mark.parametrize(("dtype", "causal"), [(torch.float32, False), (torch.bfloat16, True)])
@pytest.mark.usefixtures("short_segments")
def test_mixtures_of_keys_agree(feature_map, dtype, causal, draw, device):
    leaves = tokens(draw, device, dtype, feature_map=feature_map, length=90, heads=4, kv_heads=2, keys=3)
    leaves["priors"] = torch.rand(2, 3, generator=draw).to(device) + 0.1
    options = {
        "feature_map": feature_map,
        "causal": causal,
        "normalize": feature_map not in SIGNED,
        "positions": torch.cat([torch.arange(n) for n in (50, 40)])[None].to(device) if causal else None,
        "return_state": True,
    }
    assert_agrees(partial(run, **options), leaves, draw, TOLERANCE[dtype])


def test_a_mixture_may_have_many_keys(draw, device):
    leaves = tokens(draw, device, torch.float32, length=20, keys=17)
    leaves["priors"] = torch.rand(1, 17, generator=draw).to(device) + 0.1
    assert_agrees(partial(run, feature_map="elu"), leaves, draw, TOLERANCE[torch.float32])


@pytest.mark.parametrize("feature_map", ["elu", "favor"])
def test_a_key_of_prior_0_does_not_count(feature_map, draw, device):
    leaves = tokens(draw, device, torch.float32, feature_map=feature_map, length=40)
    alone = run("triton", leaves, feature_map=feature_map)["out"]
    # Features of the second key would be the largest by far.
    leaves["k"] = torch.stack([leaves["k"], 30 * leaves["k"]], 2)
    mixed = run("triton", leaves, feature_map=feature_map, priors=torch.tensor([[1.0, 0.0]], device=device))
    assert rms_ratio(mixed["out"], alone) < 1e-6


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("feature_map", ["elu", "favor"])
@pytest.mark.parametrize("length", tiered([1, 17, 64, 300], [1, 17, 64]))
@every_dtype
def test_any_length_agrees(feature_map, length, dtype, draw, device):
    leaves = tokens(draw, device, dtype, feature_map=feature_map, length=length, heads=1, width=16, values=16)
    assert_agrees(partial(run, feature_map=feature_map), leaves, draw, TOLERANCE[dtype])


@pytest.mark.parametrize("feature_map", ["elu", "favor", "hedgehog"])
def test_outputs_lie_in_memory_as_the_output_projection_reads_them(feature_map, draw, device):
    leaves = tokens(draw, device, torch.bfloat16, feature_map=feature_map, length=70, batch=2)
    assert run("triton", leaves, feature_map=feature_map)["out"].permute(2, 0, 1, 3).is_contiguous()
    assert_agrees(partial(run, feature_map=feature_map), leaves, draw, TOLERANCE[torch.bfloat16])


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "feature_map", ["hedgehog", "elu"]
)  # the first tier has hedgehog at 64 and elu at 128
@pytest.mark.parametrize(("width", "dtype"), [(64, torch.float32), (128, torch.bfloat16)])
def test_common_head_widths_agree(feature_map, width, dtype, draw, device):
    sizes = {"length": 130, "heads": 1, "width": width, "values": 128}
    leaves = tokens(draw, device, dtype, feature_map=feature_map, scale=0.3, **sizes)
    assert_agrees(partial(run, feature_map=feature_map), leaves, draw, TOLERANCE[dtype])


@pytest.mark.parametrize("feature_map", ["elu", "favor", "hedgehog"])
def test_inputs_of_scale_10_in_half_precision_stay_close(feature_map, draw, device):
    leaves = tokens(draw, device, torch.bfloat16, feature_map=feature_map, length=300, scale=10.0)
    fast = run("triton", leaves, feature_map=feature_map)["out"]
    exact = run("reference", {name: x.double() for name, x in leaves.items()}, feature_map=feature_map)["out"]
    # bfloat16 outputs alone are off by 2e-3.
    assert rms_ratio(fast, exact) < 2e-2


@pytest.mark.usefixtures("short_segments")
def test_a_state_from_another_rank_enters(draw, device):
    leaves = tokens(draw, device, torch.float32, length=100)
    leaves["sums"], log_scale = some_state("elu", leaves, draw)

    def exchanged(backend: str, kept: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = dict(kept)
        sums = kept.pop("sums")

        class Pending:
            def wait(self) -> KernelState:
                return KernelState(sums, log_scale.to(sums.dtype))

        q, k, v = (kept[name] for name in "qkv")
        options = {"positions": 7, "exchange": lambda own, carries: Pending(), "return_state": True}
        out, own = kernel_attention(q, k, v, feature_map="elu", backend=backend, **options)
        return {"out": out, "own": own.sums}

    assert_agrees(exchanged, leaves, draw, TOLERANCE[torch.float32])


def test_outputs_of_masked_keys_are_zero_with_finite_gradients(draw, device):
    for feature_map in ("elu", "favor"):
        leaves = tokens(draw, device, torch.float32, feature_map=feature_map, length=40)
        leaves = {name: x.requires_grad_() for name, x in leaves.items()}
        key_weights = torch.zeros(1, 1, 1, device=device)
        out = run("triton", {**leaves, "key_weights": key_weights}, feature_map=feature_map)["out"]
        assert not out.any()
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), list(leaves.values())))


def test_transposed_inputs_need_no_copy(draw, device):
    leaves = tokens(draw, device, torch.float32, length=70)
    moved = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in leaves.items()}
    assert not moved["q"].is_contiguous()
    expected = run("triton", leaves, feature_map="elu")["out"]
    assert torch.equal(run("triton", moved, feature_map="elu")["out"], expected)


def test_the_operators_pass_opcheck(draw, device):
    leaves = tokens(draw, device, torch.float32, feature_map="hedgehog", length=20)
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    keys = KernelKeyTensors(leaves["k"], leaves["v"], leaves["projection"])
    no_state = (None, None, None)
    static = KernelStatic("hedgehog", components=1, causal=True, normalize=True, start=0)
    arguments = (*KernelQueryTensors(leaves["q"]), *keys, *no_state, *static)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.megakernel.kernel_attention.default, arguments, test_utils=tests)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float64}, "q is torch.float64; expected bfloat16, float16 or float32"),
        (
            {"dtype": torch.float16},
            "q is torch.float16, whose range is too small for sums and weights; expected",
        ),
        ({"width": 80}, "q has width 80 in torch.float32; expected at most 64"),
        ({"width": 136, "dtype": torch.bfloat16}, "q has width 136 in torch.bfloat16; expected at most 128"),
        ({"values": 160}, "v has width 160 in torch.float32; expected at most 128"),
    ],
)
def test_unsupported_inputs_are_refused_with_a_reason(changes, message, draw, device):
    leaves = tokens(draw, device, length=8, **{"dtype": torch.float32, **changes})
    with pytest.raises(ValueError, match=message):
        run("triton", leaves, feature_map="elu")


def test_gpus_that_are_too_old_are_refused(draw, device):
    leaves = tokens(draw, device, torch.bfloat16, length=8)
    with (
        record_launches(75),
        pytest.raises(ValueError, match=r"compute capability 7\.5; expected at least 8\.0"),
    ):
        run("triton", leaves, feature_map="elu")


def test_few_landmarks_do_not_shorten_the_segments():
    """Bidirectional attention has states of queries in backward: few landmarks must not shorten the segments."""
    from megakernel.ops.kernels.feature_maps import phi_of

    phi = phi_of("elu", 128, None)
    q = torch.empty(1, 16, 65536, 128, dtype=torch.bfloat16, device="meta")
    alone = tiles.segment_length(phi, q, q, False)
    assert tiles.segment_length(phi, q, q[:, :, :256], False) == alone >= 2048
    assert tiles.segment_length(phi, q[:, :, :256], q, False) == alone


@pytest.mark.parametrize(("feature_map", "rows"), [("elu", None), ("favor", 128), ("hedgehog", 128)])
def test_states_take_less_than_a_quarter_of_the_memory_of_tokens(feature_map, rows):
    for heads, kv_heads in ((16, 16), (16, 4)):
        q, k = (
            torch.empty(1, n, 131072, 128, dtype=torch.bfloat16, device="meta") for n in (heads, kv_heads)
        )
        matrix = None if rows is None else torch.empty(rows, 128, device="meta")
        static = KernelStatic(feature_map, components=1, causal=True, normalize=True, start=0)
        phi = map_of_call(static, q, matrix, decays=False)
        launcher = triton.launcher_of(q, k, k, None, phi, causal=True, start=0)
        states = sum(x.numel() * x.element_size() for x in launcher.segment_buffer(k, k.shape[2]))
        assert states <= (q.numel() + k.numel()) * 2 * 2 / 4


@pytest.mark.parametrize("op", ["kernel_attention", "flurka_attention", "simple_gla"])
def test_outputs_whose_rows_would_be_too_far_apart_are_written(op, draw, device, monkeypatch):
    """In memory (N, B, H, D), rows of the outputs of many sequences are B H D elements apart."""
    batch, heads, length, width = 3, 2, 40, 16
    q, k, v = (torch.randn(batch, heads, length, width, generator=draw).to(device) for _ in range(3))
    pools = torch.randn(4, 16, generator=draw).softmax(-1).to(device)

    def run() -> Tensor:
        if op == "kernel_attention":
            return kernel_attention(q, k, v, feature_map="elu", backend="triton")
        if op == "simple_gla":
            decay = torch.full((batch, heads, length), -0.1, device=device)
            return simple_gla(q, k, v, decay, backend="triton")[0]
        pooled = {"pool_keys": pools, "pool_values": pools}
        return flurka_attention(q, k, v, feature_map="elu", **pooled, backend="triton")[0]

    expected = run()
    assert expected.stride(2) == batch * heads * width
    monkeypatch.setattr(launch, "MAX_ROW_STRIDE", batch * heads * width - 1)
    found = run()
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("feature_map", tiered(["elu", "favor", "hedgehog"], ["favor"]))
def test_cross_attention_equals_the_reference_with_as_many_keys_and_with_others(feature_map, device):
    """The keys of a padded source: one of weight 0 says nothing about the query at its place."""
    draw = torch.Generator().manual_seed(0)
    for keys in (70, 33, 150):
        q = torch.randn(2, 4, 70, 16, generator=draw)
        k, v = torch.randn(2, 2, 2, keys, 16, generator=draw).unbind(0)
        projection = torch.randn(2, 16, 16, generator=draw) if feature_map in PROJECTED else None
        real = torch.arange(keys) < torch.tensor([[keys], [keys // 2]])
        options = {"feature_map": feature_map, "causal": False, "cross": True}
        results = []
        for backend, dtype in (("reference", torch.float64), ("triton", torch.float32)):
            leaves = [x.detach().to(device, dtype).requires_grad_() for x in (q, k, v)]
            matrix = None if projection is None else projection.to(device, dtype)
            weights = real[:, None].to(device, dtype)
            out = kernel_attention(
                *leaves, projection=matrix, key_weights=weights, backend=backend, **options
            )
            out.square().sum().backward()
            results.append([out.detach(), *(x.grad for x in leaves)])
        for exact, found in zip(*results, strict=True):
            assert rms_ratio(found, exact) < 1e-5
