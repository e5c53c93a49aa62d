"""The recurrent state of a model as the cache that `generate` carries from token to token."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import Cache

from .places import Places


class StateCache(Cache):
    """What the layers keep of the tokens read so far.

    Its size does not grow with them, but for layers of full softmax or pairwise attention. All tensors have the rows of
    the batch first. It cannot forget tokens that it has read.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: list[Any] | None = None
        """One state per layer; None before the first token."""

        self.places: Places | None = None
        self.tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read, padding included."""
        return self.tokens

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first token."""
        return -1 if self.places is None else len(self.places.following)

    @property
    def is_initialized(self) -> bool:
        """Whether tokens have been read."""
        return self.states is not None

    @property
    def is_croppable(self) -> bool:
        """No."""
        return False

    def crop(self, tokens_to_remove: int) -> None:
        """Refused but for 0 tokens."""
        if tokens_to_remove:
            raise ValueError(
                "a recurrent state cannot forget tokens; decode without an assistant model or prompt lookup"
            )

    def reset(self) -> None:
        """Forget everything."""
        self.states, self.places, self.tokens = None, None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        self._map(lambda x: x.index_select(0, indices.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        self._map(lambda x: x.repeat_interleave(repeats, 0))

    def _map(self, function: Any) -> None:
        kept = (self.states, self.places)
        self.states, self.places = pytree.tree_map_only(torch.Tensor, function, kept)
