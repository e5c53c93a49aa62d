"""What the backends of `selected_attention` take besides queries, keys and values."""

from typing import Literal, NamedTuple

from torch import Tensor

from megakernel.ops.documents import Positions
from megakernel.ops.landmark_attention import Landmarks
from megakernel.ops.mixture import Rotation
from megakernel.ops.ring import Ring
from megakernel.ops.window import Tail

Unit = Literal["token", "tile"]
"""Who chooses: every token for itself, or the first token of a block for all tokens of it."""

Score = Literal["max", "lse"]
"""How the products of a query with the r landmarks of a block become the block's score."""

NONE = -1
"""In a list of chosen blocks: no block."""


class SelectionRule(NamedTuple):
    """Which tokens a query reads."""

    block_size: int
    """Tokens per block, b; blocks restart at every document."""

    near: int
    """Blocks of the window: 1: a token's current block; 2: also the block before."""

    chosen: int
    """Blocks that a query chooses among those before its window, k."""

    unit: Unit
    score: Score

    group: int
    """Blocks of a group, g: the best k groups are chosen first, then the blocks in them. 0: no groups."""

    @property
    def reach(self) -> int:
        """Tokens before a sequence in which a window or a block of it can begin."""
        return self.block_size * self.near

    @property
    def span(self) -> int:
        """Tokens of a group."""
        return self.block_size * self.group


class SelectedInputs(NamedTuple):
    """Validated arguments of a backend."""

    selection: SelectionRule
    cache: Tail
    """At least b * near earlier tokens of the sequence."""

    landmarks: Landmarks
    """Of all complete blocks, in the order of the sequence; without values."""

    groups: Landmarks | None
    """Of all complete groups; None: there are none, or the choice has one level."""

    choice: Tensor
    """(B, H_kv, k) int64: ends of the blocks that the tile before the first token chose, or MISSING."""

    rotary: Rotation | None
    rotates_chosen: bool
    """Whether queries and keys of chosen blocks are rotated, as those of the window always are."""

    positions: Positions

    ring: Ring | None = None
    """Passes on the keys and values of all shards; `cache` then has no more than a window's. None: a whole sequence."""
