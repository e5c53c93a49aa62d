"""The kernels of the gated delta rule against its float64 reference."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from megakernel.ops.documents import Positions
from megakernel.ops.gated_delta_rule import gated_delta_rule
from megakernel.ops.gated_delta_rule.triton import LAUNCH_CONFIGS
from megakernel.ops.kernels.launch import record_launches
from tests.kernels import test_simple_gla
from tests.kernels.comparing import TOLERANCE, assert_agrees
from tests.kernels.test_flurka_attention import documents
from tests.kernels.test_simple_gla import on
from tests.tiers import tiered

whole = partial(test_simple_gla.whole, op=gated_delta_rule)

BATCH = 2
LENGTH, END = 150, 70
"""Tokens of a sequence, and of its first shard: three chunks, and two and two."""

POSITIONS = {
    "one document": 0,
    "continued": 37,
    "packed": torch.cat(
        [
            documents(torch.device("cpu"), 0, 20, 23, 110, LENGTH, first=37),
            documents(torch.device("cpu"), 0, 64, 90, LENGTH),
        ]
    ),
}


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", tiered(POSITIONS, ["packed", "continued"]))
def test_outputs_states_and_gradients_equal_the_reference(positions, dtype, draw, device):
    leaves = tokens(draw, device, dtype, width=24, values=40)
    if positions != "one document":
        leaves["state"] = torch.randn(BATCH, 2, 24, 40, generator=draw).to(device)
    assert_agrees(partial(whole, positions=on(device, POSITIONS[positions])), leaves, draw, TOLERANCE[dtype])


@pytest.mark.second
@pytest.mark.parametrize("positions", ["one document", "packed"])
def test_shards_give_the_whole_sequence(positions, draw, device):
    leaves = tokens(draw, device, torch.float32, width=24, values=24)
    # No document continues at the start, because the first shard has no entering state.
    packed = documents(device, 0, 20, 23, 110, LENGTH).expand(BATCH, -1)
    where = packed if positions == "packed" else 0
    assert_agrees(partial(halves, positions=where), leaves, draw, TOLERANCE[torch.float32])


def test_the_same_key_in_all_tokens(draw, device):
    """A triangular system whose inverse has no small entries: every token corrects what the previous one wrote."""
    leaves = tokens(draw, device, torch.float32, width=16, values=16)
    leaves["k"] = leaves["k"][:, :, :1].expand(-1, -1, LENGTH, -1)
    leaves["strength"] = torch.ones_like(leaves["strength"])
    leaves["log_decay"] = torch.zeros_like(leaves["log_decay"])
    assert_agrees(partial(whole, positions=0), leaves, draw, TOLERANCE[torch.float32])


@pytest.mark.second
def test_decays_of_all_sizes_in_a_chunk(draw, device):
    """A complete decay between small ones does not cost the others digits."""
    leaves = tokens(draw, device, torch.float32, width=16, values=80)
    rare = torch.rand(leaves["log_decay"].shape, generator=draw).to(device) < 0.05
    leaves["log_decay"] = torch.where(rare, -1e4, 0.1 * leaves["log_decay"])
    assert_agrees(partial(whole, positions=0), leaves, draw, TOLERANCE[torch.float32])


def test_views_and_broadcast_decays(draw, device):
    """Tokens before heads in memory, and one decay and strength for all tokens of a head (broadcast)."""
    leaves = tokens(draw, device, torch.float32, width=16, values=16)
    for name in ("q", "k", "v"):
        leaves[name] = leaves[name].transpose(1, 2).contiguous().transpose(1, 2)
    for name in ("log_decay", "strength"):
        leaves[name] = leaves[name][:1, :, 1:2].clone()
    assert_agrees(partial(whole, positions=0), leaves, draw, TOLERANCE[torch.float32])


def test_a_state_of_other_sizes_is_refused(draw, device):
    leaves = tokens(draw, device, torch.float32, width=16, values=16)
    leaves["state"] = torch.zeros(1, 2, 16, 16, device=device)
    with pytest.raises(
        ValueError, match=r"initial_state has shape \(1, 2, 16, 16\); expected \(2, 2, 16, 16\)"
    ):
        whole("chunked", leaves, positions=0)


@pytest.mark.parametrize("length", [1, 2, 64, 65])
def test_sequences_of_any_length_equal_the_reference(length, draw, device):
    leaves = tokens(draw, device, torch.float32, width=16, values=48)
    leaves = {name: x[:, :, :length].contiguous() for name, x in leaves.items()}
    leaves["state"] = torch.randn(BATCH, 2, 16, 48, generator=draw).to(device)
    assert_agrees(partial(whole, positions=3), leaves, draw, TOLERANCE[torch.float32])


def test_any_number_of_sequences_fits_the_grids():
    """CUDA's axes after the first have at most 65,535 programs."""
    shapes = {"q": (2**15, 4, 2, 16), "k": (2**15, 2, 2, 16), "v": (2**15, 2, 2, 16)}
    leaves = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    leaves |= {name: torch.zeros(2**15, 2, 2, requires_grad=True) for name in ("log_decay", "strength")}
    with record_launches() as launches:
        gated_delta_rule(**leaves, backend="triton")[0].sum().backward()
    assert {launch.kernel.__name__ for launch in launches} == set(LAUNCH_CONFIGS)
    assert max(programs for launch in launches for programs in launch.grid[1:]) < 2**16


def test_the_operator_passes_opcheck(draw, device):
    leaves = tokens(draw, device, torch.float32, width=16, values=16)
    state = torch.zeros(BATCH, 2, 16, 16, device=device, requires_grad=True)
    given = [x[:, :, :70].contiguous().requires_grad_() for x in leaves.values()]
    torch.library.opcheck(
        torch.ops.megakernel.gated_delta_rule.default,
        (*given, None, state, -1),
        # Without test_aot_dispatch_dynamic: the backward operator is not differentiable, and X has no gradient.
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_unsupported_inputs_are_refused_with_a_reason(draw, device):
    wide = tokens(draw, device, torch.float32, width=40, values=16)
    with pytest.raises(ValueError, match=r"q has width 40 in torch\.float32; expected at most 32"):
        whole("triton", wide, positions=0)
    with (
        record_launches(80),
        pytest.raises(ValueError, match=r"q is torch\.float32 on a GPU of compute capability 8\.0"),
    ):
        whole("triton", tokens(draw, device, torch.float32, width=16, values=16), positions=0)
    with (
        record_launches(80),
        pytest.raises(ValueError, match=r"q has width 80 in torch\.bfloat16; expected at most 64"),
    ):
        whole("triton", tokens(draw, device, torch.bfloat16, width=80, values=16), positions=0)
