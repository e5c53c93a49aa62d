import pytest
import torch
from torch import Tensor

from megakernel.attention import WHOLE_SEQUENCE
from megakernel.ops.flurka_attention import flurka_attention
from megakernel.ops.flurka_attention.options import FlurkaState
from megakernel.ops.kernel_attention import kernel_attention
from megakernel.ops.state import KernelState
from megakernel.ops.window import Tail
from megakernel.ops.window_attention import window_attention
from tests.unit.ops.comparing import PACKED, random

pytestmark = pytest.mark.usefixtures("small_chunks")

B, H, KV, N, WIDTH, VALUES, BLOCK, RANK = 2, 4, 2, 23, 4, 3, 4, 2


def inputs(length: int = N, seed: int = 0) -> list[Tensor]:
    shapes = ((B, H, length, WIDTH), (B, KV, length, WIDTH), (B, KV, length, VALUES))
    return [random(*shape, seed=seed + i) for i, shape in enumerate(shapes)]


def learned(near: str, join: str, length: int = N) -> dict:
    tensors = {f"pool_{of}": random(RANK, BLOCK, seed=seed) for of, seed in (("keys", 11), ("values", 12))}
    if near == "kernel":
        tensors["far_mass"] = random(KV, seed=13)
    elif join == "gated":
        tensors["gate"] = random(B, H, length, seed=14)
        tensors["gate_weight"] = random(H, WIDTH, seed=16)
    else:
        tensors["far_weight"] = random(H, seed=15)
    return tensors


VARIANTS = [("softmax", "gated"), ("softmax", "shared"), ("kernel", "shared")]


@pytest.mark.parametrize("positions", [0, PACKED], ids=["whole_sequences", "packed"])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("size", [1, 4])
def test_as_many_landmarks_as_tokens_is_exact_kernel_attention(positions, blocks, size):
    q, k, v = inputs()
    identity = torch.eye(size, dtype=torch.float64)
    out, _ = flurka_attention(
        q,
        k,
        v,
        feature_map="elu",
        pool_keys=identity,
        pool_values=identity,
        near="kernel",
        blocks=blocks,
        positions=positions,
    )
    exact = kernel_attention(q, k, v, feature_map="elu", positions=positions)
    torch.testing.assert_close(out, exact)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("blocks", [1, 2])
def test_the_first_block_of_a_document_equals_the_near_part_exactly(variant, blocks):
    q, k, v = (x.detach() for x in inputs(BLOCK * blocks))
    tensors = learned(*variant, length=BLOCK * blocks)
    out, _ = flurka_attention(q, k, v, feature_map="elu", near=variant[0], blocks=blocks, **tensors)
    if variant[0] == "softmax":
        near, _ = window_attention(q, k, v, block_size=BLOCK, blocks=blocks)
        assert torch.equal(out, near) if variant[1] == "gated" else torch.allclose(out, near)
    else:
        torch.testing.assert_close(out, kernel_attention(q, k, v, feature_map="elu"))


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("variant", VARIANTS, ids=["gated", "shared", "kernel"])
def test_a_query_without_weights_gives_zero_and_finite_gradients(variant, backend):
    near, join = variant
    q, k, v = inputs()
    q = q.detach().index_copy(2, torch.tensor([13]), -q[:, :, 13:14].abs() - 0.1)  # its relu features are 0
    options = learned(near, join)
    out, _ = flurka_attention(q, k, v, feature_map="relu", near=near, backend=backend, **options)
    if near == "kernel":
        assert not out[:, :, 13].any()
    (slope,) = torch.autograd.grad(out.sum(), q)
    assert out.isfinite().all()
    assert slope.isfinite().all()


def test_landmarks_stand_for_the_tokens_of_their_block():
    # With equal keys, all earlier tokens have the same weight, whether in the window or through a landmark.
    q, _, v = inputs()
    k = random(1, 1, 1, WIDTH).expand(B, KV, N, WIDTH)
    uniform = torch.full((RANK, BLOCK), 1 / BLOCK, dtype=torch.float64)
    out, _ = flurka_attention(
        q, k, v, feature_map="elu", near="kernel", pool_keys=uniform, pool_values=uniform
    )
    mean = v.cumsum(2) / torch.arange(1, N + 1)[:, None]
    torch.testing.assert_close(out, mean.repeat_interleave(H // KV, 1))


def state_of_shapes(*, batch: int = B, tokens: int = BLOCK, features: int | None = None) -> FlurkaState:
    far = None
    if features is not None:
        far = KernelState(torch.zeros(batch, KV, features, VALUES + 1), torch.zeros(batch, KV))
    return FlurkaState(far, Tail(*(torch.zeros(batch, KV, tokens, width) for width in (WIDTH, VALUES))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"near": "window"}, "near='window'; expected one of 'softmax', 'kernel'"),
        ({"blocks": 3}, "blocks=3; expected one of 1, 2"),
        ({"far_rope": "all"}, "far_rope='all'; expected one of 'none', 'centroid'"),
        ({"pool_values": torch.zeros(3, BLOCK)}, r"pool_values has shape \(3, 4\)"),
        ({"pool_keys": torch.zeros(5, RANK, BLOCK)}, r"pool_keys has shape \(5, 2, 4\)"),
        (
            {"gate": torch.zeros(B, H, 3)},
            r"gate has shape \(2, 4, 3\); expected to broadcast to \(2, 4, 23\)",
        ),
        ({"near": "kernel", "gate": torch.zeros(H, 1)}, "remove gate"),
        ({"gate_weight": torch.zeros(H, WIDTH)}, "gate_weight is given without gate"),
        (
            {"gate": torch.zeros(H, 1), "gate_weight": torch.zeros(H, 3)},
            r"gate_weight has shape \(4, 3\); expected \(4, 4\)",
        ),
        ({"far_mass": torch.zeros(H)}, r"far_mass has shape \(4,\); expected \(2,\)"),
        ({"far_weight": torch.zeros(KV)}, r"far_weight has shape \(2,\); expected \(4,\)"),
        ({"gate": torch.zeros(H, 1), "far_weight": torch.zeros(H)}, "far_weight next to gate"),
        (
            {"pool_keys": torch.zeros(RANK, 0), "pool_values": torch.zeros(RANK, 0)},
            r"pool_keys has shape \(2, 0\)",
        ),
        (
            {"initial_state": state_of_shapes(tokens=BLOCK - 1)},
            r"initial_state.tail.keys has shape \(2, 2, 3, 4\); expected \(2, 2, 4, 4\)",
        ),
        ({"initial_state": state_of_shapes(batch=1)}, r"initial_state.tail.keys has shape \(1, 2, 4, 4\)"),
        (
            {"initial_state": state_of_shapes(features=7)},
            r"initial_state has sums \(2, 2, 7, 4\) .* expected \(2, 2, 4, 4\)",
        ),
        (
            {"initial_state": state_of_shapes(features=4), "exchange": WHOLE_SEQUENCE.start_prefix},
            "initial_state next to exchange",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes, message):
    q, k, v = inputs()
    pools = {"pool_keys": torch.zeros(RANK, BLOCK), "pool_values": torch.zeros(RANK, BLOCK)}
    with pytest.raises(ValueError, match=message):
        flurka_attention(q, k, v, feature_map="elu", **(pools | changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_single_token_with_a_tiny_weight_still_returns_its_value(dtype):
    # Its weight is exp(-2000 / sqrt(4)), and it sees no landmark: the mean over a single token is its value.
    q = torch.full((1, 1, 4, 4), 10.0, dtype=dtype)
    v = torch.randn(1, 1, 4, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    pool = torch.full((1, 4), 0.25, dtype=dtype)
    out, _ = flurka_attention(
        q, -50 * q, v, feature_map="elu", pool_keys=pool, pool_values=pool, backend="chunked"
    )
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0])
