"""Decoding token by token with the kernel gives the results of the whole sequence at once."""

import pytest
import torch
from torch import Tensor

from megakernel.ops.feature_maps import Map, start_state
from megakernel.ops.kernel_attention import kernel_attention
from megakernel.ops.kernel_attention.options import KernelOptions
from megakernel.ops.projections import FastFood
from megakernel.ops.state import KernelState
from tests.kernels.comparing import DEVICE, TOLERANCE, random, rms_ratio

MAPS = ("elu", "relu", "identity", "hedgehog", "favor", "prf", "rks")


def projection_of(feature_map: str, heads: int, width: int, rows: int = 24) -> Tensor | None:
    if feature_map in ("elu", "relu", "identity"):
        return None
    return random(heads, width if feature_map == "hedgehog" else rows, width, seed=9)


def tokens(batch: int, heads: int, group: int, length: int, width: int, values: int, dtype=torch.float32):
    """Queries, keys and values."""
    return (
        random(batch, heads * group, length, width, seed=0, dtype=dtype),
        random(batch, heads, length, width, seed=1, dtype=dtype),
        random(batch, heads, length, values, seed=2, dtype=dtype),
    )


def step(q: Tensor, k: Tensor, v: Tensor, *, state: KernelState, **options):
    from megakernel.ops.kernel_attention import decode

    given = KernelOptions(**{"positions": 1, **options}, initial_state=state)
    with torch.no_grad():
        reason = decode.unsupported(q, k, v, given)
        assert reason is None, reason
        return decode.step(q, k, v, given)


def exactly(x):
    """All floating tensors of a nested tuple in float64."""
    if isinstance(x, tuple):
        return type(x)(*map(exactly, x))
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def reference(q: Tensor, k: Tensor, v: Tensor, *, state: KernelState, **options):
    """The reference's output and state in float64, continuing from `state`."""
    options = {name: exactly(value) if name != "feature_map" else value for name, value in options.items()}
    return kernel_attention(
        *map(exactly, (q, k, v)),
        **options,
        initial_state=exactly(state),
        return_state=True,
        backend="reference",
    )


def assert_same(got: tuple[Tensor, KernelState], expected: tuple[Tensor, KernelState]) -> None:
    """Outputs to the rounding of their dtype, states to that of float32."""
    (out, _), (exact, _) = got, expected
    assert rms_ratio(out, exact) <= TOLERANCE[out.dtype]
    totals = (
        state.sums.double() * state.log_scale.double().exp()[..., None, None] for _, state in (got, expected)
    )
    assert rms_ratio(*totals) <= TOLERANCE[torch.float32]


def state_behind(k: Tensor, v: Tensor, feature_map: str, projection) -> KernelState:
    """The state after keys k and values v."""
    return kernel_attention(
        k, k, v, feature_map=feature_map, projection=projection, return_state=True, backend="chunked"
    )[1]


def assert_last_step_agrees(q: Tensor, k: Tensor, v: Tensor, feature_map: str, projection=None) -> None:
    """A step of the last token, from the state after the tokens before it."""
    options = {"feature_map": feature_map, "projection": projection}
    state = state_behind(k[:, :, :-1], v[:, :, :-1], **options)
    last = [x[:, :, -1:] for x in (q, k, v)]
    assert_same(step(*last, state=state, **options), reference(*last, state=state, **options))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("feature_map", MAPS)
def test_a_step_equals_the_reference(feature_map, normalize, dtype):
    """With grouped queries, key weights, and widths that are not powers of two."""
    q, k, v = tokens(3, 2, 3, 6, 12, 20, dtype)
    projection = projection_of(feature_map, 2, 12)
    options = {"feature_map": feature_map, "projection": projection}
    state = state_behind(k[:, :, :5].float(), v[:, :, :5].float(), **options)
    options |= {"normalize": normalize, "key_weights": random(3, 2, 1, seed=3).abs()}
    last = [x[:, :, 5:] for x in (q, k, v)]
    assert_same(step(*last, state=state, **options), reference(*last, state=state, **options))


@pytest.mark.parametrize("feature_map", ["elu", "hedgehog", "prf", "rks"])
def test_decoding_token_by_token_equals_the_whole_sequence(feature_map):
    q, k, v = tokens(2, 1, 2, 20, 8, 8)
    projection = projection_of(feature_map, 1, 8, 16)
    empty = start_state(feature_map, k, projection, 8)
    state, outputs = empty, []
    for at in range(20):
        token = [x[:, :, at : at + 1] for x in (q, k, v)]
        out, state = step(*token, feature_map=feature_map, projection=projection, state=state)
        outputs.append(out)
    whole = reference(q, k, v, feature_map=feature_map, projection=projection, state=empty)
    assert_same((torch.cat(outputs, 2), state), whole)


@pytest.mark.parametrize("feature_map", ["elu", "prf"])
def test_many_sequences_can_be_decoded_at_once(feature_map):
    assert_last_step_agrees(*tokens(64, 1, 2, 3, 16, 16), feature_map, projection_of(feature_map, 1, 16))


def test_wide_values_are_split_into_blocks(monkeypatch):
    from megakernel.ops.kernel_attention import decode

    monkeypatch.setattr(decode, "TILE", 16 * 16)
    assert_last_step_agrees(*tokens(2, 2, 1, 3, 16, 40), "elu")


def test_a_fastfood_projection_is_supported():
    scales, gaussians, signs, order = random(4, 2, 2, 8, seed=4)
    projection = FastFood(scales, gaussians, signs.sign(), order.argsort(-1))
    assert_last_step_agrees(*tokens(2, 2, 2, 3, 8, 8), "prf", projection)


def test_components_are_summed():
    q, k, v = tokens(1, 1, 1, 1, 8, 8)
    options = {"feature_map": Map("favor", components=2), "projection": projection_of("favor", 1, 8)}
    state = start_state(options["feature_map"], k, options["projection"], 8)
    options["normalize"] = False
    assert_same(step(q, k, v, state=state, **options), reference(q, k, v, state=state, **options))


def test_large_exponents_stay_in_range():
    """Keys of scale 10: their features without log scales would overflow or underflow float32."""
    q, k, v = tokens(2, 1, 1, 4, 16, 16)
    assert_last_step_agrees(q, 10 * k, v, "favor", projection_of("favor", 1, 16))


@pytest.mark.parametrize("feature_map", ["elu", "prf"])
def test_a_key_of_weight_0_changes_nothing(feature_map):
    """Even if it is the first: the output is 0 and the state stays empty."""
    q, k, v = tokens(2, 1, 1, 1, 8, 8)
    projection = projection_of(feature_map, 1, 8)
    state = start_state(feature_map, k, projection, 8)
    options = {"feature_map": feature_map, "projection": projection}
    out, after = step(q, k, v, state=state, key_weights=torch.zeros(2, 1, 1, device=DEVICE), **options)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(after.sums, state.sums)
    assert torch.equal(after.log_scale, state.log_scale)


@pytest.mark.parametrize("feature_map", ["hedgehog", "favor"])
def test_a_token_at_position_0_starts_a_document(feature_map, monkeypatch):
    """Next to a sequence that continues, and through the op, which takes the decoding step for single tokens."""
    from megakernel.ops.kernel_attention import triton

    q, k, v = tokens(2, 1, 2, 4, 8, 8)
    projection = projection_of(feature_map, 1, 8, 16)
    options = {"feature_map": feature_map, "projection": projection}
    state = state_behind(k[:, :, :3], v[:, :, :3], **options)
    lost = KernelState(*(torch.stack([x[0], torch.full_like(x[0], torch.nan)]) for x in state))
    options |= {"positions": torch.tensor([[3], [0]], device=DEVICE)}
    last = [x[:, :, 3:] for x in (q, k, v)]
    expected = reference(*last, state=state, **options)
    monkeypatch.setattr(triton, "kernel_operator", None)
    with torch.no_grad():
        got = kernel_attention(*last, **options, initial_state=lost, return_state=True, backend="triton")
    assert_same(got, expected)


def test_the_initial_state_is_not_modified():
    q, k, v = tokens(2, 1, 1, 3, 8, 8)
    state = state_behind(k, v, "elu", None)
    before = state.sums.clone()
    _, after = step(q[:, :, :1], k[:, :, :1], v[:, :, :1], state=state, feature_map="elu")
    assert torch.equal(state.sums, before)
    assert not torch.equal(after.sums, before)


def test_tokens_and_states_may_lie_anywhere_in_memory():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tokens(2, 2, 2, 3, 8, 8))
    state = state_behind(k[:, :, :2], v[:, :, :2], "relu", None)
    state = KernelState(state.sums.mT.contiguous().mT, state.log_scale.T.contiguous().T)
    last = [x[:, :, 2:] for x in (q, k, v)]
    assert not last[0].is_contiguous()
    options = {"feature_map": "relu"}
    assert_same(step(*last, state=state, **options), reference(*last, state=state, **options))


def test_unsupported_inputs_are_refused_with_a_reason():
    from megakernel.ops.kernel_attention import decode

    q, k, v = tokens(1, 1, 1, 2, 8, 8)
    state = start_state("elu", k, None, 8)
    options = KernelOptions("elu", positions=1, initial_state=state)
    one = [x[:, :, :1] for x in (q, k, v)]
    wide = options._replace(feature_map="prf", projection=torch.zeros(600, 8))
    smooth = options._replace(feature_map=Map("elu", 1, 0.1))
    assert decode.unsupported(*one, options) is None
    assert "continues no state" in decode.unsupported(*one, options._replace(positions=0))
    assert "priors" in decode.unsupported(*one, options._replace(priors=torch.ones(1, 2)))
    assert "q has 2 tokens" in decode.unsupported(q, k, v, options)
    assert "smoothing" in decode.unsupported(*one, smooth)
    assert "torch.float64" in decode.unsupported(*(x.double() for x in one), options)
    assert "600 features" in decode.unsupported(*one, wide)
    assert "requires a gradient" in decode.unsupported(one[0].requires_grad_(), *one[1:], options)


def test_the_operator_passes_opcheck():
    from megakernel.ops.kernel_attention import decode

    q, k, v = tokens(1, 2, 2, 1, 8, 8)
    projection = projection_of("rks", 2, 8)
    state = start_state("rks", k, projection, 8)
    torch.library.opcheck(decode._step, (q, k, v, *state, projection, None, None, "rks", 1, True))
