"""Softmax over a window and over the few earlier blocks that landmarks choose (docs/formulas.md, 11)."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernel.attention.compression import landmark_segments
from megakernel.attention.flurka import FlurkaAttention
from megakernel.attention.heads import LayerSettings
from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.landmark import gather_landmarks
from megakernel.attention.layer import AttentionLayer
from megakernel.config import mechanisms
from megakernel.config.attention import Attention
from megakernel.ops.documents import token_positions
from megakernel.ops.flurka_attention.options import FlurkaState
from megakernel.ops.selected_attention import (
    SelectedState,
    block_landmarks,
    chosen_tokens,
    selected_attention,
)
from megakernel.ops.selected_attention.grouped import groups_before
from megakernel.ops.selected_attention.inputs import SelectionRule
from megakernel.ops.selected_attention.tiles import choice_before
from megakernel.ops.tensors import accum_dtype
from megakernel.ops.window import Tail
from megakernel.ops.window_attention import window_attention


class Selector:
    """The choice of blocks of a layer, and what context-parallel shards exchange for it."""

    def __init__(self, config: Attention):
        assert config.near is not None
        assert config.selection is not None
        assert config.block_size is not None
        self.settings = config.selection
        sizes = (config.block_size, config.near.blocks, self.settings.blocks)
        group = mechanisms.BLOCKS_OF_GROUP if self.settings.levels == 2 else 0
        self.selection = SelectionRule(*sizes, self.settings.unit, self.settings.score, group)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pool: Tensor,
        inputs: AttentionInputs,
        state: SelectedState | None,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, SelectedState | None]:
        """Softmax over window and chosen blocks; pool: E (r, b) or (H_kv, r, b). out_dtype: None: that of v."""
        if inputs.cp_shard.size > 1:
            state = self._earlier_shards(q, k, v, pool, inputs)
        return selected_attention(
            q,
            k,
            v,
            pool=pool,
            selected=self.selection.chosen,
            blocks=self.selection.near,
            unit=self.selection.unit,
            score=self.selection.score,
            group=self.selection.group or None,
            rotary=inputs.rotary,
            rotates_chosen=self.settings.rope == "position",
            positions=inputs.resolved_positions,
            initial_state=state,
            return_state=inputs.return_state,
            ring=inputs.cp_shard if inputs.cp_shard.size > 1 else None,
            out_dtype=out_dtype,
        )

    def chosen_tokens(self, q: Tensor, k: Tensor, pool: Tensor, inputs: AttentionInputs) -> Tensor:
        """(B, H_kv, N, N) bool: which tokens are in blocks that a query chooses, of whole sequences; for analyses."""
        return chosen_tokens(q, k, pool, self.selection, inputs.resolved_positions)

    def _earlier_shards(
        self, q: Tensor, k: Tensor, v: Tensor, pool: Tensor, inputs: AttentionInputs
    ) -> SelectedState:
        """The landmarks of all earlier shards, the tokens of the window, and the choice of the last earlier block."""
        shard, length, positions = inputs.cp_shard, k.shape[2], inputs.resolved_positions
        selection, cache = self.selection, inputs.halo(k, v, self.selection.reach)
        own = block_landmarks(k, cache, pool, positions)
        landmarks = gather_landmarks(shard, own, length, None).before(shard.rank * own.ends.shape[1])
        # Also where every shard begins a block: all ranks of a group have to exchange, whatever their documents.
        queries = shard.previous_tokens(q.detach(), selection.block_size)
        first = token_positions(positions, length, q.device)[:, 0].expand(len(q))
        groups = groups_before(landmarks, first, selection) if selection.group else None
        choice = choice_before(queries, first, landmarks, groups, selection)
        return SelectedState(cache, landmarks, groups, choice)


class SelectedAttention(AttentionLayer):
    """Exact attention to a token's window, and to the blocks before it whose landmarks match a query best.

    Landmarks are means of equal parts of a block's unrotated keys, so the layer has no parameters.
    """

    def __init__(self, config: Attention, settings: LayerSettings):
        super().__init__(config, settings)
        assert config.near is not None
        assert config.block_size is not None
        self.block_size, self.rank = config.block_size, config.landmarks_of_block
        self.near_window = (self.block_size, config.near.blocks)
        self.selector = Selector(config)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        return self.selector.attend(q, k, v, self.landmark_pool(k), inputs, inputs.state)

    def landmark_pool(self, k: Tensor) -> Tensor:
        """(r, b): means of equal parts of a block."""
        # Made where the keys are: a table from the host would be copied in every layer.
        segments = landmark_segments(self.rank, self.block_size, k.device)
        return segments / segments.sum(1, keepdim=True, dtype=accum_dtype(k.dtype))


class FlurkaSelectedState(NamedTuple):
    """The state of a sequence."""

    flurka: FlurkaState
    selected: SelectedState


class FlurkaSelectedAttention(FlurkaAttention):
    """FLuRKA whose window also has the chosen blocks, with one normalizer for both.

    Its landmarks choose, and the far context sums all of them, those of chosen blocks too. The gate learns from all
    parts, E from the far context alone. The window is computed twice: FLuRKA's output is that of its gate g, to which
    g times what the chosen blocks change in the window's mean is added.
    """

    def __init__(self, config: Attention, settings: LayerSettings):
        super().__init__(config, settings)
        self.selector = Selector(config)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        before: FlurkaSelectedState | None = inputs.state
        out, flurka = super().attend(q, k, v, replace(inputs, state=before and before.flurka))
        dtype, pool = accum_dtype(q.dtype), self.landmark_pool(k)
        both, selected = self.selector.attend(q, k, v, pool, inputs, before and before.selected, dtype)
        tail = inputs.halo(k, v, self.reach) if inputs.cp_shard.size > 1 else before and before.flurka.tail
        window, _ = window_attention(
            *(x.to(dtype) for x in (q, k, v)),
            block_size=self.block_size,
            blocks=self.near.blocks,
            rotary=inputs.rotary,
            positions=inputs.resolved_positions,
            initial_state=tail and Tail(*(x.to(dtype) for x in tail)),
        )
        gate = self.gate(q)
        assert gate is not None
        # Where nothing was chosen, window and both are the same up to rounding, and FLuRKA's gate is 1.
        out = (out + torch.sigmoid(gate.to(dtype))[..., None] * (both - window)).to(v.dtype)
        return out, None if selected is None else FlurkaSelectedState(flurka, selected)

    def landmark_pool(self, k: Tensor) -> Tensor:
        """E (r, b) or (H_kv, r, b), without a gradient."""
        return self._pool(self.pool_keys).detach()
