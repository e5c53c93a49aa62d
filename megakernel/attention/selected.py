"""Softmax over a window and over the few earlier blocks that landmarks choose (docs/formulas.md, 11)."""

from typing import Any

import torch
from torch import Tensor

from megakernel.attention.compression import landmark_segments
from megakernel.attention.heads import LayerSettings
from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.landmark import gather_landmarks
from megakernel.attention.layer import AttentionLayer
from megakernel.config.attention import Attention
from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.documents import token_positions
from megakernel.ops.selected_attention import SelectedState, block_landmarks, selected_attention
from megakernel.ops.selected_attention.inputs import Selection
from megakernel.ops.selected_attention.tiles import choice_before
from megakernel.ops.window import Tail


class SelectedAttention(AttentionLayer):
    """Exact attention to a token's window, and to the blocks before it whose landmarks match a query best.

    Landmarks are means of equal parts of a block's unrotated keys, so the layer has no parameters.
    """

    def __init__(self, config: Attention, settings: LayerSettings):
        super().__init__(config, settings)
        assert config.near is not None
        assert config.near.block_size is not None
        assert config.selection is not None
        self.near, self.selection = config.near, config.selection
        self.block_size = config.near.block_size
        self.near_window = (self.block_size, self.near.blocks)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        pool, state = self._means(k), inputs.state
        if inputs.cp_shard.size > 1:
            state = self._earlier_shards(q, k, v, pool, inputs)
        return selected_attention(
            q,
            k,
            v,
            pool=pool,
            selected=self.selection.blocks,
            blocks=self.near.blocks,
            unit=self.selection.unit,
            score=self.selection.score,
            rotary=inputs.rotary,
            rotates_chosen=self.selection.rope == "position",
            positions=inputs.resolved_positions,
            initial_state=state,
            return_state=inputs.return_state,
        )

    def _earlier_shards(
        self, q: Tensor, k: Tensor, v: Tensor, pool: Tensor, inputs: AttentionInputs
    ) -> SelectedState:
        """The state before this shard: keys and values of all shards are gathered, and those of earlier ones kept."""
        shard, length, positions = inputs.cp_shard, k.shape[2], inputs.resolved_positions
        selection, size = self._selection, self.block_size
        own = block_landmarks(k, inputs.halo(k, v, selection.reach), pool, positions)
        landmarks = gather_landmarks(shard, own, length, None).before(shard.rank * own.ends.shape[1])
        cache = Tail(*(shard.all_tokens(x)[:, :, : shard.rank * length] for x in (k, v)))
        # Also where every shard begins a block: all ranks of a group have to exchange, whatever their documents.
        queries = shard.previous_tokens(q.detach(), size)
        first = token_positions(positions, length, q.device)[:, 0].expand(len(q))
        return SelectedState(cache, landmarks, choice_before(queries, first, landmarks, selection))

    @property
    def _selection(self) -> Selection:
        chosen = self.selection
        return Selection(self.block_size, self.near.blocks, chosen.blocks, chosen.unit, chosen.score)

    def _means(self, like: Tensor) -> Tensor:
        """(r, b): each landmark is the mean of its part of the block."""
        segments = landmark_segments(self.selection.landmarks, self.block_size)
        weights = segments / segments.sum(1, keepdim=True, dtype=torch.float64)
        return weights.to(like.device, accum_dtype(like.dtype))
