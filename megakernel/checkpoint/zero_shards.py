"""ZeRO's files of optimizer state: what each has of a parameter, and where.

DeepSpeed writes one file for each data-parallel rank (data x context) of each model-parallel rank (a tensor rank of a
pipeline stage). It has flat groups: float32 weights, and moments as long.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from megakernel.parallel.ranks import Ranks

from .manifest import SavedCheckpoint
from .weights_only import load
from .whole_tensors import STEP, WEIGHT

_FILE = re.compile(r"(?:\w+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
"""Name of a file, with its data-parallel and its model-parallel rank."""

_FLAT = "single_partition_of_fp32_groups", "base_optimizer_state"
_FLAT_ZERO_3 = "fp32_flat_groups", "optimizer_state_dict"
"""Entries of a file (stages 1 and 2, stage 3): weights of the flat groups, and their optimizer state."""

_MAPPINGS = "param_slice_mappings"
"""Entry of a file of stages 1 and 2: for each group, where the file has a parameter's elements."""

ParamShapes = Sequence[Mapping[str, Sequence[int]]]
"""Shapes of the parameters of each group, in order, as DeepSpeed records them."""


class FlatSlice(NamedTuple):
    """A slice of a flat group that has elements of a parameter."""

    data_rank: int
    """That wrote the file."""

    group: int
    """The flat group."""

    start: int
    """In the group."""

    flat: range
    """The elements, in the flattened parameter."""


class _Contents(NamedTuple):
    """What a file says of its groups."""

    slices: dict[str, tuple[int, int, int]]
    """Name of a parameter -> group, start in it, number of elements; empty with stage 3."""

    states: dict[int, dict[str, float | None]]
    """Group -> keys of its optimizer state, with the value of STEP."""


class ZeroShards:
    """The files of a checkpoint with ZeRO; of one without, there are none.

    ranks: the ranks that open it now; each reads the headers of some files and tells the others.
    Raises UserError, alike on all of them, if a file is damaged.
    """

    def __init__(self, checkpoint: SavedCheckpoint, ranks: Ranks):
        self._folder = checkpoint.folder
        layout = checkpoint.progress.layout
        self._zero_stage = layout["zero_stage"]
        self._names = {
            (int(match[2]), int(match[1])): name
            for name in checkpoint.files
            if (match := _FILE.fullmatch(name)) is not None
        }
        self._open: dict[tuple[int, int], Mapping[str, Any]] = {}
        # With stage 3 every file is divided alike, and the first has all steps.
        indexed = sorted(key for key in self._names if self._zero_stage < 3 or key[1] == 0)
        share = ranks.each(lambda: {key: self._contents(*key) for key in indexed[ranks.rank :: ranks.size]})
        contents = {key: one for part in ranks.all(lambda: share) for key, one in part.items()}
        self._contents_of = {
            model_rank: [contents[key] for key in keys]
            for model_rank, keys in groupby(indexed, key=lambda key: key[0])
        }
        self._data_ranks = layout["data"] * layout["context"]
        self._slices: dict[int, dict[str, list[FlatSlice]]] = {}
        self._starts: dict[int, dict[str, tuple[int, int, int, int]]] = {}

    def slices(self, model_rank: int, name: str, span: range, shapes: ParamShapes) -> Sequence[FlatSlice]:
        """The slices that have some of a range of a trained parameter, which is flattened.

        shapes: of the model-parallel rank.
        """
        if self._zero_stage == 3:
            return self._equal_shares(model_rank, name, span, shapes)
        if model_rank not in self._slices:
            self._slices[model_rank] = self._recorded_slices(model_rank)
        slices = self._slices[model_rank][name]
        return [part for part in slices if part.flat.start < span.stop and span.start < part.flat.stop]

    def state(self, model_rank: int, group: int) -> dict[str, float | None]:
        """The keys of the optimizer state of a group, with the number of updates for STEP."""
        return self._contents_of[model_rank][0].states.get(group, {})

    def read(self, model_rank: int, part: FlatSlice, key: str) -> Tensor:
        """The elements of a slice, with one dimension: of the float32 weights for WEIGHT, else of the state `key`."""
        weights, states = self._entries
        shard = self._load(model_rank, part.data_rank)
        groups = shard[weights] if key == WEIGHT else shard[states]["state"]
        flat = groups[part.group] if key == WEIGHT else groups[part.group][key]
        return flat[part.start : part.start + len(part.flat)]

    @property
    def _entries(self) -> tuple[str, str]:
        return _FLAT_ZERO_3 if self._zero_stage == 3 else _FLAT

    def _recorded_slices(self, model_rank: int) -> dict[str, list[FlatSlice]]:
        slices: dict[str, list[FlatSlice]] = {}
        for data_rank, contents in enumerate(self._contents_of[model_rank]):
            for name, (group, start, numel) in contents.slices.items():
                held = slices.setdefault(name, [])
                first = held[-1].flat.stop if held else 0
                held.append(FlatSlice(data_rank, group, start, range(first, first + numel)))
        return slices

    def _equal_shares(self, model_rank: int, name: str, span: range, shapes: ParamShapes) -> list[FlatSlice]:
        """The slices of stage 3: every data-parallel rank has an equal share of every parameter; the last is padded."""
        if model_rank not in self._starts:
            starts = self._starts[model_rank] = {}
            for group, parameters in enumerate(shapes):
                start = 0
                for other, shape in parameters.items():
                    numel = prod(shape)
                    share = -(-numel // self._data_ranks)
                    starts[other] = (group, start, numel, share)
                    start += share
        group, start, numel, share = self._starts[model_rank][name]
        return [
            FlatSlice(rank, group, start, range(rank * share, min((rank + 1) * share, numel)))
            for rank in range(span.start // share, -(-span.stop // share))
        ]

    def _contents(self, model_rank: int, data_rank: int) -> _Contents:
        shard = self._load(model_rank, data_rank)
        states = shard[self._entries[1]]["state"]
        return _Contents(
            {
                name: (group, address.start, address.numel)
                for group, addresses in enumerate(shard.get(_MAPPINGS, ()))
                for name, address in addresses.items()
            },
            {
                group: {key: float(value) if key == STEP else None for key, value in state.items()}
                for group, state in states.items()
            },
        )

    def _load(self, model_rank: int, data_rank: int) -> Mapping[str, Any]:
        key = model_rank, data_rank
        if key not in self._open:
            self._open[key] = load(self._folder / self._names[key])["optimizer_state_dict"]
        return self._open[key]
