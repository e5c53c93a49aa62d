from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megakernel.attention import WHOLE_SEQUENCE
from megakernel.ops.feature_maps import Map
from megakernel.ops.kernel_attention import kernel_attention
from megakernel.ops.partial_output import kernels_check
from megakernel.ops.state import KernelState
from tests.unit.ops.comparing import random

pytestmark = pytest.mark.usefixtures("small_chunks")

B, H, KV, N, WIDTH, VALUES = 2, 4, 2, 23, 4, 3

every_map = pytest.mark.parametrize("feature_map", ["elu", "favor", "hedgehog", "relu", "identity"])


def inputs(length: int = N, kv_heads: int = KV, seed: int = 0) -> list[Tensor]:
    shapes = ((B, H, length, WIDTH), (B, kv_heads, length, WIDTH), (B, kv_heads, length, VALUES))
    return [random(*shape, seed=seed + i) for i, shape in enumerate(shapes)]


def projection_of(feature_map: str, kv_heads: int = KV) -> Tensor | None:
    rows = {"favor": 6, "hedgehog": WIDTH}.get(feature_map)
    return None if rows is None else random(kv_heads, rows, WIDTH, seed=9)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_and_cu_seqlens_are_equivalent(dtype):
    q, k, v = inputs()
    positions = torch.cat([torch.arange(9), torch.arange(14), torch.arange(23)]).view(B, N)
    listed = kernel_attention(
        q, k, v, feature_map="elu", cu_seqlens=torch.tensor([0, 9, 23, 46], dtype=dtype)
    )
    assert torch.equal(kernel_attention(q, k, v, feature_map="elu", positions=positions), listed)


@every_map
@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("causal", [True, False])
def test_masked_keys_do_not_count(feature_map, backend, causal):
    q, k, v = inputs()
    key_weights = torch.ones(B, 1, N, dtype=torch.float64)
    key_weights[:, :, 5:9] = 0
    options = {"feature_map": feature_map, "projection": projection_of(feature_map), "causal": causal}
    loud = k.clone()
    loud[:, :, 5:9] *= 30
    masked = kernel_attention(q, loud, v, key_weights=key_weights, backend=backend, **options)
    real = [i for i in range(N) if not 5 <= i < 9]
    without = kernel_attention(*(x[:, :, real] for x in (q, k, v)), backend=backend, **options)
    torch.testing.assert_close(masked[:, :, real], without)


@every_map
@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_outputs_without_keys_are_zero_and_have_finite_gradients(feature_map, backend):
    q, k, v = inputs()
    out = kernel_attention(
        q,
        k,
        v,
        feature_map=feature_map,
        projection=projection_of(feature_map),
        key_weights=torch.zeros(1, 1, 1, dtype=torch.float64),
        backend=backend,
    )
    assert not out.any()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), (q, k, v)))


def test_favor_estimates_softmax():
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 32, 8, generator=draw, dtype=torch.float64) / 2 for _ in range(3))
    omega = torch.randn(100_000, 8, generator=draw, dtype=torch.float64)
    out = kernel_attention(q, k, v, feature_map="favor", projection=omega)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    # The error of the estimate falls as M^-1/2, here 0.3 %.
    torch.testing.assert_close(out, exact, atol=1e-2, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_summed_in_float32(dtype):
    q, k, v = (x.detach().to(dtype) for x in inputs())
    out, state = kernel_attention(
        q, k, v, feature_map="favor", projection=projection_of("favor"), return_state=True
    )
    assert out.dtype == dtype
    assert state.sums.dtype == state.log_scale.dtype == torch.float32


def test_environment_names_the_backend(monkeypatch):
    q, k, v = inputs()
    monkeypatch.setenv("MEGAKERNEL_BACKEND", "fast")
    with pytest.raises(ValueError, match="MEGAKERNEL_BACKEND='fast': expected one of chunked, reference"):
        kernel_attention(q, k, v, feature_map="elu")
    # The argument takes precedence.
    kernel_attention(q, k, v, feature_map="elu", backend="chunked")
    with pytest.raises(ValueError, match="backend='slow'"):
        kernel_attention(q, k, v, feature_map="elu", backend="slow")


def with_shape(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": with_shape(2, 4, 23)}, r"q has shape \(2, 4, 23\)"),
        ({"q": with_shape(2, 4, 23, 4, dtype=torch.int64)}, "q has dtype torch.int64"),
        ({"k": with_shape(2, 2, 22, 4)}, r"k has shape \(2, 2, 22, 4\); expected \(2, heads, 23, 4\)"),
        (
            {"v": with_shape(2, 2, 23, 3, dtype=torch.float32)},
            "v is torch.float32 on cpu; expected torch.float64",
        ),
        ({"v": with_shape(2, 1, 23, 3)}, r"v has shape \(2, 1, 23, 3\)"),
        (
            {"k": with_shape(2, 3, 23, 4), "v": with_shape(2, 3, 23, 3)},
            "q has 4 heads and k 3; expected a multiple",
        ),
        ({"feature_map": "cosine"}, "feature_map='cosine'; expected one of elu"),
        ({"feature_map": "favor"}, "projection is None; favor needs one"),
        ({"projection": with_shape(4, 4)}, r"projection is of shape \(4, 4\); elu takes none"),
        ({"feature_map": "favor", "projection": with_shape(6, 5)}, r"projection has shape \(6, 5\)"),
        (
            {"key_weights": with_shape(2, 3, 23)},
            r"key_weights has shape \(2, 3, 23\); expected to broadcast to \(2, 2, 23\)",
        ),
        ({"cu_seqlens": torch.tensor([0, 9, 4, 46])}, "expected strictly increasing offsets"),
        ({"cu_seqlens": torch.tensor([0, 9])}, r"expected starts from 0 on and B \* N = 46 at the end"),
        ({"cu_seqlens": torch.tensor([0.0, 46.0])}, "expected a vector of int32 or int64"),
        (
            {"positions": torch.zeros(2, 22, dtype=torch.int64)},
            r"positions is torch.int64 of shape \(2, 22\)",
        ),
        (
            {"initial_state": KernelState(with_shape(2, 2, 4, 3), with_shape(2, 2))},
            r"initial_state has sums \(2, 2, 4, 3\)",
        ),
        (
            {"initial_state": KernelState(with_shape(2, 2, 7, 4), with_shape(2, 2))},
            r"initial_state has sums \(2, 2, 7, 4\) .* expected \(2, 2, 4, 4\) and \(2, 2\)",
        ),
        (
            {
                "initial_state": KernelState(with_shape(2, 2, 4, 4), with_shape(2, 2)),
                "exchange": WHOLE_SEQUENCE.start_prefix,
            },
            "initial_state next to exchange",
        ),
        ({"feature_map": Map("elu", smoothing=-1.0)}, "feature_map has smoothing=-1.0"),
        ({"positions": 0, "cu_seqlens": torch.tensor([0, 46])}, "positions next to cu_seqlens"),
        ({"positions": [0, 1]}, r"positions=\[0, 1\]; expected an int"),
        ({"exchange_after": WHOLE_SEQUENCE.start_suffix}, "expected exchange alone"),
        ({"exchange": WHOLE_SEQUENCE.start_prefix, "causal": False}, "expected both or neither"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes, message):
    q, k, v = inputs()
    arguments = {"q": q, "k": k, "v": v, "feature_map": "elu", **changes}
    with pytest.raises(ValueError, match=message):
        kernel_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def test_on_a_gpu_only_relative_sums_are_checked_for_underflow():
    """The host waits for the GPU to check, so layers of bounded maps, as the default's, do not."""
    gpu, cpu = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)
    assert [kernels_check(name, True, gpu) for name in ("elu", "hedgehog", "favor", "prf", "relu")] == [
        *(False, False, True, True, False)
    ]
    assert all(kernels_check(name, True, cpu) for name in ("elu", "hedgehog", "favor", "prf"))
    assert kernels_check("hedgehog", True, gpu, decays=True)
    assert not kernels_check("favor", False, cpu)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_a_masked_key_of_another_sequence_does_not_hide_a_query(backend):
    """With as many keys as queries: the query at a masked key's place has underflowed, and is recomputed."""
    q, k, v = (x.float() for x in inputs())
    q[..., 0], k[..., 0] = 30.0, -30.0
    projection = torch.zeros(2, WIDTH)
    projection[:, 0] = torch.tensor([3.0, -3.0])  # the features of queries are tiny in all keys
    key_weights = torch.ones(B, 1, N)
    key_weights[:, :, 5:] = 0
    options = {"feature_map": "favor", "projection": projection, "causal": False, "key_weights": key_weights}
    found = kernel_attention(q, k, v, cross=True, backend=backend, **options)
    seen = (x[:, :, :5].double() for x in (k, v))
    exact = kernel_attention(
        q.double(), *seen, feature_map="favor", projection=projection.double(), causal=False
    )
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)
    assert found[:, :, 5:].abs().max() > 0


def test_cross_attention_has_neither_order_nor_documents():
    q, k, v = inputs()
    positions = torch.arange(N).expand(B, N)
    for options in ({"causal": True}, {"causal": False, "positions": positions}):
        with pytest.raises(ValueError, match="cross with causal=True, positions or cu_seqlens"):
            kernel_attention(q, k, v, feature_map="elu", cross=True, **options)


@every_map
def test_a_state_is_read_by_keys_that_do_not_count(feature_map):
    """What `attention.cross` does for each token that is written."""
    q, k, v = inputs()
    options = {"feature_map": feature_map, "projection": projection_of(feature_map), "causal": False}
    whole, state = kernel_attention(q, k, v, return_state=True, cross=True, **options)
    nothing = {"key_weights": torch.zeros(B, 1, 1, dtype=torch.float64), "initial_state": state}
    empty = (torch.zeros(B, KV, 1, WIDTH).double(), torch.zeros(B, KV, 1, VALUES).double())
    for token in (0, 7, N - 1):
        read = kernel_attention(q[:, :, token : token + 1], *empty, cross=True, **nothing, **options)
        torch.testing.assert_close(read, whole[:, :, token : token + 1])
