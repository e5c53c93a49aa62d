"""What is counted of launches is what they do: loads, stores and products of kernels in the interpreter."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from megakernel.analysis.speed.cases import Case
from megakernel.analysis.speed.contenders import Contender
from megakernel.analysis.speed.passes import NOT_OF_TOKENS, counted
from megakernel.analysis.speed.subject import draw, subject
from megakernel.ops.flurka_attention import launches
from megakernel.ops.kernels.launch import Tile
from tests.kernels.comparing import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="counts what Triton's interpreter does")

BFLOAT16 = 2
"""Bytes."""


class Access(NamedTuple):
    """Numbers that one instruction loads or stores."""

    stores: bool
    places: np.ndarray
    size: int
    beside: int
    """Place on the grid's second axis."""


class Record:
    """What one launch did."""

    def __init__(self, name: str, arguments: dict[str, Tensor]):
        self.name, self.flops = name, 0
        self.accesses: list[Access] = []
        self.arguments = arguments

    @property
    def moved(self) -> int:
        """Bytes of tokens and landmarks that were read before they were written, once each, and that were written.

        Once each in the programs of one place on the grid's second axis, to be exact.
        """
        counted = [x for name, x in self.arguments.items() if name not in NOT_OF_TOKENS]
        ours = {(x.data_ptr(), x.data_ptr() + x.nbytes) for x in counted if x.numel()}
        places = np.concatenate([one.places for one in self.accesses])
        sizes = np.concatenate([np.full(len(one.places), one.size) for one in self.accesses])
        stores = np.concatenate([np.full(len(one.places), one.stores) for one in self.accesses])
        kept = np.zeros(len(places), bool)
        for begin, end in ours:
            kept |= (places >= begin) & (places < end)
        beside = np.concatenate([np.full(len(one.places), one.beside) for one in self.accesses])
        places, sizes, stores = (places + (beside << 48))[kept], sizes[kept], stores[kept]
        _, first = np.unique(places, return_index=True)
        _, written = np.unique(places[stores], return_index=True)
        return int(sizes[first][~stores[first]].sum() + sizes[stores][written].sum())


@pytest.fixture
def records(monkeypatch) -> list[Record]:
    """One for every launch from now on."""
    found: list[Record] = []
    builder = interpreter.interpreter_builder
    load, store, dot = builder.create_masked_load, builder.create_masked_store, builder.create_dot
    run = interpreter.GridExecutor.__call__

    def noted(executor, *arguments, **options):
        tensors = {name: x for name, x in zip(executor.arg_names, arguments) if isinstance(x, Tensor)}
        found.append(Record(executor.fn.__name__, tensors))
        return run(executor, *arguments, **options)

    def access(pointers, mask, stores: bool) -> None:
        # A mask may hold 0 and 1.
        places = np.broadcast_to(pointers.data, np.shape(mask.data))[mask.data.astype(bool)]
        size = pointers.get_element_ty().primitive_bitwidth // 8
        found[-1].accesses.append(Access(stores, places.astype(np.int64).ravel(), size, builder.grid_idx[1]))

    def noted_load(pointers, mask, *rest):
        access(pointers, mask, False)
        return load(pointers, mask, *rest)

    def noted_store(pointers, value, mask, *rest):
        access(pointers, mask, True)
        return store(pointers, value, mask, *rest)

    def noted_dot(a, b, *rest):
        found[-1].flops += 2 * a.data.size * b.data.shape[-1]
        return dot(a, b, *rest)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", noted)
    monkeypatch.setattr(builder, "create_masked_load", noted_load)
    monkeypatch.setattr(builder, "create_masked_store", noted_store)
    monkeypatch.setattr(builder, "create_dot", noted_dot)
    return found


@pytest.fixture
def narrow_programs(monkeypatch):
    """Two programs of FLuRKA's for the values of a head of 32, as wide heads have them."""
    monkeypatch.setitem(launches.TILES, (2, 64), Tile(32, 16, 4))


@pytest.mark.usefixtures("narrow_programs")
@pytest.mark.parametrize(
    ("preset", "tokens", "head_dim"),
    [
        ("linear", 64, 64),
        ("performer", 64, 64),
        ("hedgehog", 32, 128),
        ("flurka", 64, 32),
        ("flurka_kernel", 128, 32),
    ],
)
def test_counted_passes_are_what_a_layer_s_launches_do(
    preset, tokens, head_dim, records, monkeypatch, device
):
    monkeypatch.setenv("MEGAKERNEL_BACKEND", "triton")
    case = Case(1, tokens, 1, head_dim)
    layer = subject(Contender(preset, preset, is_ours=True), case, draw(case, device, torch.bfloat16))
    layer.train()
    did = [one for one in records if one.name != "pass_states"]
    forward, back = counted(preset, head_dim, BFLOAT16, tokens)
    passes = [*forward, *back][: len(did)]
    assert [one.name for one in did] == [one.name for one in passes]
    assert [one.flops for one in did] == [one.cost.flops for one in passes]
    # Numbers of single tokens stand unused among the arguments of a launch here and there.
    assert [one.moved for one in did] == [pytest.approx(one.cost.bytes, rel=0.01) for one in passes]
