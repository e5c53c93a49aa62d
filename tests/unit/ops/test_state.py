import torch

from megakernel.ops import KernelState, kernel_attention, merge
from megakernel.ops.state import empty_state, keep
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
