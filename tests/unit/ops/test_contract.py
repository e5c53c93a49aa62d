"""What every op promises, for every case of `cases.py` and each of its backends that run without Triton.

`tests/kernels/test_contract.py` has the same promises of kernels.
"""

from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megakernel.ops.state import KernelState
from tests.tiers import tiered
from tests.unit.ops.cases import BATCH, CASES, Leaves, make, of_sequence, part_of
from tests.unit.ops.comparing import PACKED

pytestmark = pytest.mark.usefixtures("small_chunks")

LENGTH = PACKED.shape[1]
TOKENS = [1] * LENGTH

TOLERANCE = 1e-9
"""Of sums of float64 in another order; the weights of a random sum can reach hundreds."""

every_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(autouse=True)
def constants(request, monkeypatch):
    for module, name, value in CASES[request.node.callspec.params["name"]].constants:
        monkeypatch.setattr(module, name, value)


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def outputs(name: str, leaves: Leaves, positions, state, backend: str = "chunked") -> list[Tensor]:
    """The output, and the outgoing state."""
    out, left = CASES[name].call(leaves, positions, state, backend)
    return [out, *CASES[name].state(left)]


def with_gradients(found: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """`found`, and the gradients of a random weighted sum of it."""
    draw = torch.Generator().manual_seed(1)
    # Drawn for each, because a state without landmarks may be a constant.
    weights = [torch.randn(x.shape, generator=draw, dtype=torch.float64) for x in found]
    total = sum((x * weight).sum() for x, weight in zip(found, weights))
    return [*found, *torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)]


def assert_equals_the_reference(name: str, length: int, positions, state=None) -> None:
    leaves = make(name, length)
    learned = [x.requires_grad_() for x in leaves.values() if x.is_floating_point()]
    learned += [x for x in tensors_in(state) if x.requires_grad]
    found, expected = (
        with_gradients(outputs(name, leaves, positions, state, backend), learned)
        for backend in ("chunked", "reference")
    )
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


@cache
def whole(name: str, packed: bool) -> list[Tensor]:
    """The outputs of the chunked op, for several checks."""
    with torch.no_grad():
        return outputs(name, make(name, LENGTH), PACKED if packed else 0, None)


@every_case
@pytest.mark.parametrize("length", [LENGTH, 1, 3])
def test_values_and_gradients_equal_the_reference_at_any_length(name, length):
    assert_equals_the_reference(name, length, 0)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.packs and not case.continues])
def test_values_and_gradients_of_packed_documents_equal_the_reference(name):
    assert_equals_the_reference(name, LENGTH, PACKED)


def entering(name: str, past: int):
    """The state after `past` tokens, whose tensors are leaves."""
    with torch.no_grad():
        _, state = CASES[name].call(make(name, past), 0, None, "chunked")
    return learning(state)


def learning(state):
    if isinstance(state, KernelState):  # whose scales have no gradient
        return KernelState(state.sums.clone().requires_grad_(), state.log_scale)
    if isinstance(state, Tensor):
        return state.clone().requires_grad_(state.is_floating_point())
    return None if state is None else type(state)(*map(learning, state))


def tensors_in(state) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    return [] if state is None else [x for part in state for x in tensors_in(part)]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.continues])
def test_values_and_gradients_of_continued_and_packed_sequences_equal_the_reference(name):
    """One sequence continues its document to the end, the other ends it and begins two more, the first of one token."""
    past, places = 13, torch.arange(LENGTH)
    documents = [past + places[:5], places[:1], places[: LENGTH - 6]]
    positions = torch.stack([past + places, torch.cat(documents)])
    assert_equals_the_reference(name, LENGTH, positions, entering(name, past))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.causal and case.continues])
@pytest.mark.parametrize(
    ("packed", "parts"),
    tiered(
        [(True, TOKENS), (True, [4, 1, 9, 9]), (False, TOKENS), (False, [15, 8])],
        [(True, TOKENS), (False, [15, 8])],
    ),
    ids=["packed tokens", "packed parts", "tokens", "halves"],
)
@torch.no_grad()
def test_a_sequence_may_be_split_anywhere(name, packed, parts):
    leaves, expected = make(name, LENGTH), whole(name, packed)
    found, state, begin = [], None, 0
    for size in parts:
        here = slice(begin, begin + size)
        positions = PACKED[:, here] if packed else begin
        out, state = CASES[name].call(part_of(name, leaves, here), positions, state, "chunked")
        found.append(out)
        begin += size
    for one, other in zip([torch.cat(found, -2), *CASES[name].state(state)], expected, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.packs])
@torch.no_grad()
def test_packed_documents_are_as_documents_apart(name):
    leaves, (packed, *_) = make(name, LENGTH), whole(name, True)
    for sequence in range(BATCH):
        starts = (PACKED[sequence] == 0).nonzero().flatten().tolist()
        for begin, end in pairwise([*starts, LENGTH]):
            alone = part_of(name, of_sequence(leaves, sequence), slice(begin, end))
            expected = outputs(name, alone, 0, None)[0]
            assert_close(packed[sequence : sequence + 1, ..., begin:end, :], expected)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.causal])
@torch.no_grad()
def test_later_tokens_leave_earlier_outputs_as_they_are(name):
    leaves, (before, *_) = make(name, LENGTH), whole(name, False)
    for cut in (1, 4, 10, 16, 22):
        changed = {key: x.clone() for key, x in leaves.items()}
        for key, later in part_of(name, changed, slice(cut, None)).items():
            if key in ("q", "k", "v"):
                later *= -3
        out = outputs(name, changed, 0, None)[0]
        # Products of other shapes are rounded differently.
        torch.testing.assert_close(out[..., :cut, :], before[..., :cut, :], rtol=1e-12, atol=1e-12)


@every_case
def test_two_runs_are_bit_identical_with_and_without_gradients(name):
    leaves = {key: x.requires_grad_(x.is_floating_point()) for key, x in make(name, LENGTH).items()}
    for one, other in zip(outputs(name, leaves, 0, None), whole(name, False), strict=True):
        assert torch.equal(one, other)


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.covering(1, 1)
@torch.no_grad()
def test_half_precision_is_rounded_once(name, dtype):
    """Sums are float32: the output has the dtype of the inputs and is within a few roundings of theirs."""
    leaves = make(name, LENGTH, dtype=dtype)
    out = outputs(name, leaves, 0, None)[0]
    exact = {key: x.double() if x.is_floating_point() else x for key, x in leaves.items()}
    expected = outputs(name, exact, 0, None, "reference")[0]
    assert out.dtype == dtype
    assert (out.double() - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        pytest.param(name, change, message, id=f"{name}, {message} {number}")
        for name, case in CASES.items()
        for number, (change, message) in enumerate(case.refusals)
    ],
)
def test_inputs_that_do_not_fit_are_named(name, change, message):
    leaves, positions = make(name, LENGTH), change.get("positions", 0)
    leaves |= {key: changed(leaves[key]) for key, changed in change.items() if key in leaves}
    with pytest.raises(ValueError, match=f"^{message}"):
        CASES[name].call(leaves, positions, None, "chunked")


@every_case
def test_an_unknown_backend_is_refused_with_those_that_exist(name):
    backends = {"reference", *CASES[name].backends}
    with pytest.raises(ValueError, match="backend='none of them'") as refusal:
        CASES[name].call(make(name, 5), 0, None, "none of them")
    assert all(backend in str(refusal.value) for backend in backends)
