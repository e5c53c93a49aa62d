"""The kernels of simple gated linear attention against its float64 reference."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from megakernel.ops.documents import Positions
from megakernel.ops.kernel_attention import tiles
from megakernel.ops.simple_gla import simple_gla
from tests.kernels.comparing import TOLERANCE, assert_agrees
from tests.kernels.test_exchange import Chain
from tests.kernels.test_flurka_attention import documents

LENGTH, END = 110, 50
"""Tokens of a sequence, and of its first shard."""

POSITIONS = {
    "one document": 0,
    "continued": 37,
    "packed": documents(torch.device("cpu"), 0, 20, 23, 80, LENGTH, first=37),
}


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    """Segments so short that sequences and shards have several; their edges differ from those of shards."""
    monkeypatch.setattr(tiles, "segment_length", lambda phi, q, v, causal: 32)


def tokens(draw: torch.Generator, device: torch.device, dtype: torch.dtype, width: int) -> dict[str, Tensor]:
    """The state decays little in the first key head, and nearly completely in the last."""
    q, k, v = (torch.randn(1, heads, LENGTH, width, generator=draw).to(dtype) for heads in (4, 2, 2))
    strengths = torch.tensor([0.05, 3.0])[None, :, None]
    log_decay = -strengths * torch.rand(1, 2, LENGTH, generator=draw)
    return {name: x.to(device) for name, x in {"q": q, "k": k, "v": v, "log_decay": log_decay}.items()}


def whole(
    backend: str,
    leaves: dict[str, Tensor],
    *,
    positions: Positions,
    op: Callable[..., tuple[Tensor, Tensor]] = simple_gla,
) -> dict[str, Tensor]:
    leaves = dict(leaves)
    state = leaves.pop("state", None)
    out, left = op(**leaves, positions=positions, initial_state=state, backend=backend)
    return {"out": out, "left": left}


def halves(backend: str, leaves: dict[str, Tensor], *, positions: Positions) -> dict[str, Tensor]:
    """The whole sequence with the reference, or two shards with the kernels."""
    if backend != "triton":
        return whole(backend, leaves, positions=positions)
    chain, outputs = Chain(), []
    for begin, end in ((0, END), (END, LENGTH)):
        here = {name: x[:, :, begin:end] for name, x in leaves.items()}
        at = positions + begin if isinstance(positions, int) else positions[:, begin:end]
        outputs.append(simple_gla(**here, positions=at, exchange=chain, backend=backend)[0])
    left = chain.leaving.sums * chain.leaving.log_scale.exp()[..., None, None]
    return {"out": torch.cat(outputs, 2), "left": left[..., : leaves["v"].shape[-1]]}


def on(device: torch.device, positions: Positions) -> Positions:
    return positions if isinstance(positions, int) else positions.to(device)


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", POSITIONS)
def test_outputs_states_and_gradients_equal_the_reference(positions, dtype, draw, device):
    leaves = tokens(draw, device, dtype, width=24)
    if positions != "one document":
        leaves["state"] = torch.randn(1, 2, 24, 24, generator=draw).to(device)
    assert_agrees(partial(whole, positions=on(device, POSITIONS[positions])), leaves, draw, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_of_values_agree_with_the_reference(dtype, draw, device):
    leaves = tokens(draw, device, dtype, width=24)
    leaves["value_scale"] = torch.rand(1, 2, LENGTH, generator=draw).to(device)
    leaves["value_scale"][..., ::5] = 0.0
    leaves["state"] = torch.randn(1, 2, 24, 24, generator=draw).to(device)
    packed = partial(whole, positions=on(device, POSITIONS["packed"]))
    assert_agrees(packed, leaves, draw, TOLERANCE[dtype])


def test_a_decay_that_leaves_nothing_does_not_disturb_later_tokens(draw, device):
    leaves = tokens(draw, device, torch.float32, width=24)
    leaves["log_decay"][:, :, ::7] = -1e6
    assert_agrees(partial(whole, positions=0), leaves, draw, TOLERANCE[torch.float32])


@pytest.mark.parametrize("positions", ["one document", "packed"])
def test_shards_give_the_whole_sequence(positions, draw, device):
    leaves = tokens(draw, device, torch.float32, width=24)
    # No document continues at the start, because the first shard has no entering state.
    where = documents(device, 0, 20, 23, 80, LENGTH) if positions == "packed" else 0
    assert_agrees(partial(halves, positions=where), leaves, draw, TOLERANCE[torch.float32])
