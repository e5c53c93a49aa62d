import pytest
import torch

from megakernel.ops.softmax_attention import softmax_attention
from megakernel.ops.weighted_attention import WeightedState, responsibilities, streamed, weighted_attention
from tests.unit.ops.comparing import PACKED, assert_same, random

pytestmark = pytest.mark.usefixtures("small_chunks")

B, H, KV, M, N, WIDTH, VALUES = 2, 4, 2, 2, 23, 4, 3


def inputs(keys: int = M, length: int = N):
    shapes = ((B, H, length, WIDTH), (B, KV, keys, length, WIDTH), (B, KV, length, VALUES))
    return [random(*shape, seed=i) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_keys_of_weight_0_do_not_count(normalize, causal):
    q, k, v = inputs()
    key_weights = (torch.rand(B, KV, M, N, generator=torch.Generator().manual_seed(0)) > 0.4).double()
    key_weights[0, :, :, :9] = 0  # the first queries see nothing

    def run(backend):
        return weighted_attention(
            q, k, v, key_weights=key_weights, causal=causal, normalize=normalize, backend=backend
        )[:1]

    assert_same(run, [q, k, v])
    if causal:
        assert not run("chunked")[0][0, :, :9].any()


def test_one_mixture_key_equals_softmax_attention():
    q, k, v = inputs(keys=1)
    expected, _ = softmax_attention(q, k[:, :, 0], v, positions=PACKED)
    torch.testing.assert_close(
        weighted_attention(q, k[:, :, 0], v, similarity="softmax", positions=PACKED)[0], expected
    )


def test_equal_mixture_keys_count_as_one():
    q, k, v = inputs(keys=1)
    twice = k.expand(-1, -1, 2, -1, -1)
    priors = torch.tensor([0.3, 0.7])[:, None].double()
    torch.testing.assert_close(
        weighted_attention(q, twice, v, key_weights=priors, normalize=False)[0],
        weighted_attention(q, k, v, normalize=False)[0],
    )


def test_distant_keys_do_not_underflow():
    # exp(-|q - k|^2 / 2) underflows even in float64 here; quotients of weights do not.
    q, k, v = (x.detach() for x in inputs())
    far = weighted_attention(q + 100, k, v, causal=False)[0]
    assert far.isfinite().all()
    torch.testing.assert_close(far, weighted_attention(q + 100, k, v, causal=False, backend="reference")[0])
    ones = torch.ones_like(v)
    torch.testing.assert_close(weighted_attention(q + 100, k, ones)[0], ones.repeat_interleave(2, 1))


@pytest.mark.parametrize("similarity", ["softmax", "gaussian"])
def test_long_sequences_of_large_bf16_inputs_stay_near_float64(similarity, monkeypatch):
    monkeypatch.setattr(streamed, "KEYS", 512)  # as usual: 128 blocks instead of 8192
    length, new = 65_536, 4
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        (10 * torch.randn(1, 1, count, 8, generator=draw)).bfloat16() for count in (new, length, length)
    )
    state = WeightedState(k[:, :, None, :-new], v[:, :, :-new])
    options = {"similarity": similarity, "positions": length - new}

    def run(*tensors, state):
        return weighted_attention(*tensors, initial_state=WeightedState(*state), **options)[0]

    with torch.no_grad():
        out = run(q, k[:, :, -new:], v[:, :, -new:], state=state)
        exact = run(
            *(x.double() for x in (q, k[:, :, -new:], v[:, :, -new:])), state=[x.double() for x in state]
        )
    assert out.isfinite().all()
    # bf16 keeps 8 bits of the output.
    assert (out.double() - exact).norm() / exact.norm() < 2e-2


def test_no_more_pairs_than_one_block_exist_at_once(monkeypatch):
    sizes = []
    weigh = streamed.position_logs
    monkeypatch.setattr(
        streamed, "position_logs", lambda *args: sizes.append((result := weigh(*args)).shape[-2:]) or result
    )
    q, k, v = inputs(length=64)
    weighted_attention(q, k, v, causal=False)[0].sum().backward()
    assert set(sizes) == {(4, 8)}


def test_tiles_without_visible_pairs_are_not_computed(monkeypatch):
    seen = []
    weigh = streamed.position_logs
    monkeypatch.setattr(streamed, "position_logs", lambda *args: seen.append(args[4].any()) or weigh(*args))
    q, k, v = inputs(length=64)
    weighted_attention(q, k, v, positions=torch.arange(64).remainder(16).expand(B, -1))
    assert all(seen)
    assert len(seen) == 4 * (1 + 1 + 2 + 2), "16 queries in 4 blocks see up to 16 keys in blocks of 8"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("positions", [0, PACKED], ids=["whole_sequences", "packed"])
def test_responsibilities_equal_the_reference_and_add_up_to_the_queries(causal, positions):
    q, k, _ = inputs()
    key_weights = torch.tensor([0.7, 0.4])[:, None]
    real = torch.rand(B, N, generator=torch.Generator().manual_seed(0)) > 0.3
    options = {
        "variances": (1.0, 0.5),
        "key_weights": key_weights,
        "query_mask": real,
        "causal": causal,
        "positions": positions,
    }
    shares = responsibilities(q, k, **options)
    torch.testing.assert_close(shares, responsibilities(q, k, backend="reference", **options))
    if causal and isinstance(positions, int):
        queries = real.flip(1).cumsum(1).flip(1) * (H // KV)
        torch.testing.assert_close(shares.sum(2), queries[:, None].double().expand(B, KV, N))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"similarity": "cosine"}, "similarity='cosine'"),
        ({"join": "mean"}, "join='mean'"),
        ({"variances": (1.0,)}, "1.0"),
        ({"variances": (1.0, -1.0)}, "one positive number per key"),
        ({"similarity": "softmax", "variances": (1.0, 1.0)}, "for gaussian only"),
        ({"key_weights": torch.ones(3)}, "key_weights has shape"),
        (
            {"initial_state": WeightedState(torch.zeros(1, KV, 2, 3, 4), torch.zeros(1, KV, 3, 3))},
            "initial_state.keys has shape",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        weighted_attention(*inputs(), **changes)
