"""The gated delta rule by flash-linear-attention's kernels against its float64 reference."""

from functools import partial
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from megakernel.ops import dispatch
from megakernel.ops.documents import Positions
from megakernel.ops.gated_delta_rule import gated_delta_rule, triton
from megakernel.ops.kernels.launch import record_launches
from tests.kernels import test_simple_gla
from tests.kernels.comparing import DEVICE, TOLERANCE, assert_agrees
from tests.kernels.completed_interpreter import complete_for_fla
from tests.kernels.test_flurka_attention import documents
from tests.kernels.test_simple_gla import on
from tests.tiers import tiered
from tests.unit.ops.test_dispatch import OnGpu

whole = partial(test_simple_gla.whole, op=gated_delta_rule)

DTYPES = [torch.bfloat16] if DEVICE == "cuda" else [torch.float32, torch.bfloat16]
"""On a GPU the kernels do not take float32."""

DTYPE = DTYPES[0]

BATCH = 2
LENGTH, END = 100, 70
"""Tokens of a sequence, and of its first shard: two chunks, and two and one."""

POSITIONS = {
    "one document": 0,
    "continued": 37,
    "packed": torch.cat(
        [
            documents(torch.device("cpu"), 0, 20, 23, 70, LENGTH, first=37),
            documents(torch.device("cpu"), 0, 64, 90, LENGTH),
        ]
    ),
}


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    if DEVICE == "cpu":
        complete_for_fla(monkeypatch)


def tolerance(dtype: torch.dtype, positions: Positions = 0) -> float:
    # In float32, sums of log decays over starts of documents cost digits.
    return TOLERANCE[dtype] * (2 if dtype == torch.float32 and not isinstance(positions, int) else 1)


def tokens(
    draw: torch.Generator, device: torch.device, dtype: torch.dtype, width: int, values: int
) -> dict[str, Tensor]:
    """The state decays little in the first key head, and nearly completely in the last; some tokens write nothing."""
    shapes = {"q": (4, width), "k": (2, width), "v": (2, values)}
    drawn = {
        name: torch.randn(BATCH, heads, LENGTH, size, generator=draw)
        for name, (heads, size) in shapes.items()
    }
    drawn["k"] = normalize(drawn["k"], dim=-1)
    leaves = {name: x.to(dtype) for name, x in drawn.items()}
    leaves["log_decay"] = -torch.tensor([0.05, 3.0])[:, None] * torch.rand(BATCH, 2, LENGTH, generator=draw)
    strength = torch.rand(BATCH, 2, LENGTH, generator=draw)
    leaves["strength"] = strength.masked_fill(strength < 0.1, 0.0)
    return {name: x.to(device) for name, x in leaves.items()}


def halves(backend: str, leaves: dict[str, Tensor], *, positions: Positions) -> dict[str, Tensor]:
    """The whole sequence with the reference, or two shards with the kernels."""
    if backend != "triton":
        return whole(backend, leaves, positions=positions)
    entered: list[Tensor] = []

    def hand_on(through: Tensor, own: Tensor) -> Tensor:
        entered.append(through @ entered[-1] + own if entered else own)
        return entered[-2] if len(entered) > 1 else torch.zeros_like(own)

    outputs = []
    for begin, end in ((0, END), (END, LENGTH)):
        here = {name: x[:, :, begin:end] for name, x in leaves.items()}
        places = positions + begin if isinstance(positions, int) else positions[:, begin:end]
        outputs.append(gated_delta_rule(**here, positions=places, exchange=hand_on, backend=backend)[0])
    return {"out": torch.cat(outputs, 2), "left": entered[-1]}


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions", tiered(POSITIONS, ["packed", "continued"]))
def test_outputs_states_and_gradients_equal_the_reference(positions, dtype, draw, device):
    leaves = tokens(draw, device, dtype, width=24, values=40)
    if positions != "one document":
        leaves["state"] = torch.randn(BATCH, 2, 24, 40, generator=draw).to(device)
    assert_agrees(
        partial(whole, positions=on(device, POSITIONS[positions])),
        leaves,
        draw,
        tolerance(dtype, POSITIONS[positions]),
    )


@pytest.mark.second
@pytest.mark.parametrize("positions", ["one document", "packed"])
def test_shards_give_the_whole_sequence(positions, draw, device):
    leaves = tokens(draw, device, DTYPE, width=24, values=24)
    # No document continues at the start, because the first shard has no entering state.
    packed = documents(device, 0, 20, 23, 70, LENGTH).expand(BATCH, -1)
    where = packed if positions == "packed" else 0
    assert_agrees(partial(halves, positions=where), leaves, draw, tolerance(DTYPE, where))


def test_the_same_key_in_all_tokens(draw, device):
    """A triangular system whose inverse has no small entries: every token corrects what the previous one wrote."""
    leaves = tokens(draw, device, DTYPE, width=16, values=16)
    leaves["k"] = leaves["k"][:, :, :1].expand(-1, -1, LENGTH, -1)
    leaves["strength"] = torch.ones_like(leaves["strength"])
    # No leaf: the state is that of the last token alone, so that the gradient of the decay is a sum that cancels.
    none = torch.zeros_like(leaves.pop("log_decay"))
    assert_agrees(
        lambda backend, kept: whole(backend, {**kept, "log_decay": none}, positions=0),
        leaves,
        draw,
        tolerance(DTYPE),
    )


@pytest.mark.second
def test_decays_of_all_sizes_in_a_chunk(draw, device):
    """A complete decay between small ones does not cost the others digits."""
    leaves = tokens(draw, device, DTYPE, width=16, values=80)
    rare = torch.rand(leaves["log_decay"].shape, generator=draw).to(device) < 0.05
    leaves["log_decay"] = torch.where(rare, -1e4, 0.1 * leaves["log_decay"])
    assert_agrees(partial(whole, positions=0), leaves, draw, tolerance(DTYPE))


def test_views_and_broadcast_decays(draw, device):
    """Tokens before heads in memory, and one decay and strength for all tokens of a head (broadcast)."""
    leaves = tokens(draw, device, DTYPE, width=16, values=16)
    for name in ("q", "k", "v"):
        leaves[name] = leaves[name].transpose(1, 2).contiguous().transpose(1, 2)
    for name in ("log_decay", "strength"):
        leaves[name] = leaves[name][:1, :, 1:2].clone()
    assert_agrees(partial(whole, positions=0), leaves, draw, tolerance(DTYPE))


def test_a_state_of_other_sizes_is_refused(draw, device):
    leaves = tokens(draw, device, DTYPE, width=16, values=16)
    leaves["state"] = torch.zeros(1, 2, 16, 16, device=device)
    with pytest.raises(
        ValueError, match=r"initial_state has shape \(1, 2, 16, 16\); expected \(2, 2, 16, 16\)"
    ):
        whole("chunked", leaves, positions=0)


@pytest.mark.parametrize("length", [1, 2, 64, 65])
def test_sequences_of_any_length_equal_the_reference(length, draw, device):
    leaves = tokens(draw, device, DTYPE, width=16, values=48)
    leaves = {name: x[:, :, :length].contiguous() for name, x in leaves.items()}
    leaves["state"] = torch.randn(BATCH, 2, 16, 48, generator=draw).to(device)
    assert_agrees(partial(whole, positions=3), leaves, draw, tolerance(DTYPE))


def test_the_operator_passes_opcheck(draw, device):
    leaves = tokens(draw, device, DTYPE, width=16, values=16)
    given = [x[:, :2, :70].transpose(1, 2).contiguous().requires_grad_() for x in leaves.values()]
    state = torch.zeros(BATCH, 2, 16, 16, device=device, requires_grad=True)
    torch.library.opcheck(
        torch.ops.megakernel.gated_delta_rule.default,
        (*given, state),
        # Without test_aot_dispatch_dynamic: the backward operator is not differentiable.
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_a_compiled_call_is_one_graph_with_the_same_gradients(draw, device):
    leaves = tokens(draw, device, DTYPE, width=16, values=16)
    positions = on(device, POSITIONS["packed"])[:, :70]
    found = []
    for compiles in (False, True):
        torch._dynamo.reset()
        op = (
            torch.compile(gated_delta_rule, backend="aot_eager", fullgraph=True)
            if compiles
            else gated_delta_rule
        )
        given = [x[:, :, :70].clone().requires_grad_() for x in leaves.values()]
        out, left = op(*given, positions=positions, backend="triton")
        found.append(torch.autograd.grad(out.float().square().sum() + left.square().sum(), given))
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_unsupported_inputs_are_refused_with_a_reason(draw, device, monkeypatch):
    bfloat16 = partial(tokens, draw, device, torch.bfloat16)
    with pytest.raises(ValueError, match=r"q has width 264 in torch\.bfloat16; expected at most 256"):
        whole("triton", bfloat16(width=264, values=16), positions=0)
    with (
        record_launches(),
        pytest.raises(ValueError, match=r"q is torch\.float32, whose products .* to TF32"),
    ):
        whole("triton", tokens(draw, device, torch.float32, width=16, values=16), positions=0)
    with record_launches(75), pytest.raises(ValueError, match=r"capability 7\.5; expected at least 8\.0"):
        whole("triton", bfloat16(width=16, values=16), positions=0)
    many = {name: x[:1, :, :2].expand(2**15, -1, -1, *x.shape[3:]) for name, x in bfloat16(16, 16).items()}
    with pytest.raises(ValueError, match=r"32768 sequences of 4 heads are 131072; expected at most 65535"):
        whole("triton", many, positions=0)
    monkeypatch.setattr(triton, "HAS_OLD_TRITON", True)
    with (
        record_launches(90),
        pytest.raises(ValueError, match=r"wrong gradients .* 9\.0; expected at least 3\.7\.1"),
    ):
        whole("triton", bfloat16(width=16, values=16), positions=0)


INSTALLED = {"fla-core": "0.6.1", "flash-qla": "0.1.3"}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        ({"flash-qla": None}, None),
        ({"fla-core": None}, "flash-linear-attention is not installed: pip install"),
        ({"fla-core": "0.5.2"}, "flash-linear-attention is 0.5.2; expected 0.6: pip install"),
        (
            {"flash-qla": "0.1.2"},
            "flash-qla 0.1.2 rounds gradients of decays to bfloat16; expected at least 0.1.3",
        ),
    ],
)
def test_what_is_installed_decides(changed, problem, monkeypatch):
    def version(name: str) -> str:
        found = (INSTALLED | changed)[name]
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(triton, "version", version)
    found = triton._problem()
    assert found is None if problem is None else found.startswith(problem)


def test_without_it_the_chunked_form_runs_with_a_warning(draw, device, monkeypatch):
    leaves = tokens(draw, device, torch.bfloat16, width=16, values=16)
    expected = whole("chunked", leaves, positions=0)
    monkeypatch.setattr(triton, "PROBLEM", "flash-linear-attention is not installed: pip install")
    dispatch._warn_once.cache_clear()
    on_gpu = {name: x.as_subclass(OnGpu) for name, x in leaves.items()}
    with pytest.warns(
        RuntimeWarning, match="gated_delta_rule runs without its kernels: flash-linear-attention is"
    ):
        found = whole(None, on_gpu, positions=0)
    assert all(torch.equal(found[name].as_subclass(Tensor), expected[name]) for name in expected)
