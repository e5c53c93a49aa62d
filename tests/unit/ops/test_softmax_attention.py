import pytest
import torch

from megakernel.ops.softmax_attention import SoftmaxState, softmax_attention
from megakernel.ops.window import Tail
from megakernel.ops.window_attention import window_attention
from tests.unit.ops.comparing import PACKED, assert_same, random

pytestmark = pytest.mark.usefixtures("small_chunks")

B, H, KV, N, WIDTH = 2, 4, 2, 23, 4


def inputs(length: int = N):
    shapes = ((B, H, length, WIDTH), (B, KV, length, WIDTH), (B, KV, length, WIDTH))
    return [random(*shape, seed=i) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("softcap", [None, 0.3])
@pytest.mark.parametrize("length", [1, N])
def test_a_causal_key_mask_equals_the_reference(length, softcap):
    q, k, v = inputs(length)
    # Wider values than keys: not all of PyTorch's kernels take them.
    v = torch.cat([v, v], -1)
    key_mask = torch.rand(B, length, generator=torch.Generator().manual_seed(0)) > 0.5
    key_mask[0] = False

    def run(backend):
        return softmax_attention(q, k, v, key_mask=key_mask, softcap=softcap, backend=backend)[:1]

    assert_same(run, [q, k, v])
    assert not run("chunked")[0][0].any()


def test_keys_without_weight_give_zero():
    q, k, v = inputs()
    key_weights = torch.rand(B, N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    key_weights[0] = key_weights[1, :5] = 0
    key_weights.requires_grad_()

    def run(backend):
        return softmax_attention(q, k, v, causal=False, key_weights=key_weights, backend=backend)[:1]

    assert_same(run, [q, k, v, key_weights])
    assert not run("chunked")[0][0].any()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("positions", [0, PACKED], ids=["whole_sequences", "packed"])
def test_softcap_equals_the_reference(window, positions):
    q, k, v = inputs()

    def run(backend):
        options = {"window": window, "softcap": 0.3, "positions": positions, "backend": backend}
        return softmax_attention(q, k, v, **options)[:1]

    assert_same(run, [q, k, v])
    # Independently: the last query, whose document is the whole sequence, or its last 13 tokens.
    reach = min(window or N, N if isinstance(positions, int) else 13)
    exponents = 0.3 * torch.tanh(q[1, 3, -1] @ k[1, 1, -reach:].T / WIDTH**0.5 / 0.3)
    torch.testing.assert_close(run("chunked")[0][1, 3, -1], exponents.softmax(0) @ v[1, 1, -reach:])


@pytest.mark.parametrize("keys", [7, 40])
@pytest.mark.parametrize("masked", [False, True])
def test_softcap_with_another_number_of_keys_than_queries_sees_all_keys(keys, masked):
    q, (_, k, v) = inputs()[0], inputs(keys)
    key_mask = torch.ones(B, keys, dtype=torch.bool)
    if masked:
        key_mask[:, 2:5] = False

    def run(backend):
        options = {"causal": False, "softcap": 0.3, "key_mask": key_mask if masked else None}
        return softmax_attention(q, k, v, **options, backend=backend)[:1]

    assert_same(run, [q, k, v])
    exponents = 0.3 * torch.tanh(q[1, 3, -1] @ k[1, 1, key_mask[1]].T / WIDTH**0.5 / 0.3)
    torch.testing.assert_close(run("chunked")[0][1, 3, -1], exponents.softmax(0) @ v[1, 1, key_mask[1]])


@pytest.mark.parametrize("window", [1, 5, N])
@pytest.mark.parametrize("positions", [0, PACKED], ids=["whole_sequences", "packed"])
def test_a_window_shows_only_the_last_tokens(window, positions):
    q, k, v = inputs()

    def run(backend):
        options = {"window": window, "positions": positions, "backend": backend}
        return softmax_attention(q, k, v, **options)[:1]

    assert_same(run, [q, k, v])
    # Independently: the softmax of each query over its last tokens.
    out = run("reference")[0]
    documents = torch.arange(N) if isinstance(positions, int) else positions[1]
    for i in range(N):
        seen = slice(i - min(window - 1, int(documents[i])), i + 1)
        weights = (q[1, 3, i] @ k[1, 1, seen].T / WIDTH**0.5).softmax(0)
        torch.testing.assert_close(out[1, 3, i], weights @ v[1, 1, seen])


@pytest.mark.parametrize("steps", [[N], [1] * N, [4, 1, 9, 9]], ids=str)
def test_a_cache_keeps_only_the_keys_that_a_window_sees(steps):
    q, k, v = inputs()
    outs, state, done = [], None, 0
    for parts in zip(*(x.split(steps, 2) for x in (q, k, v))):
        out, state = softmax_attention(*parts, window=6, positions=done, initial_state=state)
        outs.append(out)
        done += out.shape[2]
        assert state.keys.shape[2] <= 5
    torch.testing.assert_close(torch.cat(outs, 2), softmax_attention(q, k, v, window=6)[0])


def test_a_window_as_long_as_the_sequence_equals_softmax():
    q, k, v = inputs()
    torch.testing.assert_close(window_attention(q, k, v, block_size=N)[0], softmax_attention(q, k, v)[0])


def test_packed_sequences_need_no_square_mask(monkeypatch):
    # The mask of a block of 8 queries begins at the start of their documents.
    seen = []
    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, attn_mask, **options: (
            seen.append(attn_mask.shape[-1]) or attend(*args, attn_mask=attn_mask, **options)
        ),
    )
    q, k, v = inputs(64)
    softmax_attention(q, k, v, positions=torch.arange(64).remainder(16).expand(B, -1))
    assert max(seen) == 16


def test_key_weights_are_refused_where_they_would_be_ignored():
    q, k, v = inputs()
    weights, mask = torch.ones(B, N), torch.ones(B, N, dtype=torch.bool)
    for options in ({"key_mask": mask}, {"positions": PACKED}, {"softcap": 0.3}, {"causal": True}):
        with pytest.raises(ValueError, match="key_weights with"):
            softmax_attention(q, k, v, key_weights=weights, **{"causal": False, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"key_mask": torch.ones(B, N)},
            r"key_mask is torch.float32 of shape \(2, 23\); expected torch.bool",
        ),
        ({"key_mask": torch.ones(N, dtype=torch.bool)}, r"key_mask is torch.bool of shape \(23,\)"),
        (
            {"key_mask": torch.ones(B, N, dtype=torch.bool), "initial_state": SoftmaxState(*inputs()[1:])},
            "key_mask next to initial_state",
        ),
        (
            {"initial_state": SoftmaxState(inputs()[1][:1], inputs()[2])},
            r"initial_state.keys has shape \(1, 2, 23, 4\); expected \(2, 2, tokens, 4\)",
        ),
        (
            {"initial_state": SoftmaxState(inputs()[1], inputs()[0])},
            r"initial_state.values has shape \(2, 4,",
        ),
        ({"softcap": 0.0}, "softcap=0.0; expected a number above 0, or None"),
        ({"key_weights": torch.ones(3, N), "causal": False}, r"key_weights has shape \(3, 23\)"),
        ({"positions": [0, 1]}, r"positions=\[0, 1\]; expected an int, or a tensor of shape \(2, 23\)"),
        ({"positions": torch.ones(B, N, dtype=torch.bool)}, "positions is torch.bool"),
    ],
)
def test_arguments_that_do_not_fit_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        softmax_attention(*inputs(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size=0; expected at least 1"),
        (
            {"block_size": 8, "initial_state": Tail(*(x[:, :, :7] for x in inputs()[1:]))},
            r"initial_state.keys has shape \(2, 2, 7, 4\); expected \(2, 2, 8, 4\)",
        ),
    ],
)
def test_a_window_names_arguments_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        window_attention(*inputs(), **options)
