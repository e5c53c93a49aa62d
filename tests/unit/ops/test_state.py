import pytest
import torch

from megakernel.ops.flurka_attention import flurka_attention
from megakernel.ops.kernel_attention import kernel_attention
from megakernel.ops.state import KernelState, empty_state, keep, merge
from tests.unit.ops.comparing import random

OMEGA = random(6, 4, seed=9).detach()


def state_of(k, v) -> KernelState:
    return kernel_attention(k, k, v, feature_map="favor", projection=OMEGA, return_state=True)[1]


def assert_same_state(actual: KernelState, expected: KernelState) -> None:
    shift = torch.exp(actual.log_scale - expected.log_scale)[..., None, None]
    torch.testing.assert_close(actual.sums * shift, expected.sums)


def test_merging_states_gives_the_state_of_all_keys():
    k, v = random(2, 3, 20, 4), random(2, 3, 20, 5, seed=1)
    parts = [state_of(k[:, :, part], v[:, :, part]) for part in (slice(0, 7), slice(7, 20))]
    assert_same_state(merge(*parts), state_of(k, v))
    assert_same_state(merge(*reversed(parts)), state_of(k, v))


def test_merge_supports_very_different_scales():
    # A sum of parts with scales exp(-2000) and exp(2000), both outside of float64's range.
    sums = torch.ones(1, 1, 2, 3)
    low, high = KernelState(sums, torch.tensor([[-2000.0]])), KernelState(2 * sums, torch.tensor([[2000.0]]))
    merged = merge(low, high)
    assert torch.equal(merged.sums, high.sums)
    assert torch.equal(merged.log_scale, high.log_scale)


def test_the_empty_state_changes_nothing():
    state = state_of(random(2, 3, 20, 4), random(2, 3, 20, 5, seed=1))
    for merged in (merge(state, empty_state(state)), merge(empty_state(state), state)):
        assert torch.equal(merged.sums, state.sums)
        assert torch.equal(merged.log_scale, state.log_scale)
    nothing = merge(empty_state(state), empty_state(state))
    assert not nothing.sums.any()


def test_keep_empties_the_other_sequences():
    state = state_of(random(2, 3, 20, 4), random(2, 3, 20, 5, seed=1))
    kept = keep(state, torch.tensor([True, False]))
    assert torch.equal(kept.sums[0], state.sums[0])
    assert_same_state(
        merge(kept, state),
        KernelState(state.sums * torch.tensor([2.0, 1.0])[:, None, None, None], state.log_scale),
    )


def _kernel(q, k, v, state, at):
    return kernel_attention(q, k, v, feature_map="elu", initial_state=state, return_state=True)


def _flurka(q, k, v, state, at):
    pool = torch.full((1, 4), 0.25)
    options = {"near": "kernel", "pool_keys": pool, "pool_values": pool}
    return flurka_attention(q, k, v, feature_map="elu", **options, positions=at, initial_state=state)


@pytest.mark.parametrize("parts", [[10, 10], [1] * 20], ids=["chunks", "tokens"])
@pytest.mark.parametrize("op", [_kernel, _flurka])
def test_an_underflowed_query_leaves_states_and_other_sequences_as_they_are(op, parts):
    q, k, v = (random(2, 1, 20, 8, seed=seed).detach().float() for seed in range(3))
    loud_q, loud_k = q.clone(), k.clone()
    loud_q[1, :, 3] = -60
    loud_k[1] = -60 * k[1].abs()
    outputs = []
    for queries, keys in ((q, k), (loud_q, loud_k)):
        state, done, out = None, 0, []
        for chunk in zip(*(x.split(parts, 2) for x in (queries, keys, v))):
            one, state = op(*chunk, state, done)
            done += chunk[0].shape[2]
            out.append(one)
        sums = getattr(state, "far", state).sums
        assert sums.dtype == torch.float32
        outputs.append(torch.cat(out, 2))
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert outputs[1][1, :, 3].any()
