"""How keys and values are shortened along the sequence: `block`, `pool` and `linformer`."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from .errors import Problem
from .section import Section

Stage = Literal["input", "projected"]


class _Compression(Section):
    compress: Stage | None = None
    """What E and F act on: `input` (FLuRKA eq. 2) or `projected` keys and values (eq. 1); None: input if it can be."""


class BlockCompression(_Compression):
    """Blocks of `block_size` tokens become `rank` landmarks each: k~ = E k_block, v~ = F v_block."""

    kind: Literal["block"] = "block"
    """How the sequence is shortened."""

    block_size: int = Field(default=64, gt=0)
    """Tokens per block, b."""

    rank: int = Field(default=8, gt=0, le=1_000_000)
    """Landmarks per block, r."""

    per_head: bool = False
    """One (E, F) for each key head instead of one shared by all heads of the layer."""

    share_kv: bool = False
    """One E for keys and values."""

    def problems(self) -> Iterator[Problem]:
        """A block has no more landmarks than tokens."""
        if self.rank > self.block_size:
            yield Problem(
                "rank", self.rank, f"exceeds block_size={self.block_size}", f"set rank<={self.block_size}"
            )
        yield from _stage_problems(self.compress, self.per_head)


class PoolCompression(_Compression):
    """Blocks of `block_size` tokens become their mean."""

    kind: Literal["pool"]
    """How the sequence is shortened."""

    block_size: int = Field(default=64, gt=0)
    """Tokens per block, b."""


class LinformerCompression(_Compression):
    """All tokens of a row become `rank` landmarks: E, F in R^(d_k x N), one column for each place of a row.

    N is model.max_positions, else training.seq_len; shorter rows use the first columns.
    """

    kind: Literal["linformer"]
    """How the sequence is shortened."""

    rank: int = Field(default=256, gt=0, le=1_000_000)
    """Landmarks of a row, d_k."""

    per_head: bool = False
    """One (E, F) for each key head instead of one shared by all heads of the layer."""

    share_kv: bool = False
    """One E for keys and values."""

    def problems(self) -> Iterator[Problem]:
        """Heads share what acts on the input."""
        yield from _stage_problems(self.compress, self.per_head)


def _stage_problems(compress: Stage | None, per_head: bool) -> Iterator[Problem]:
    if compress == "input" and per_head:
        reason = "is what the heads of a layer share, and per_head gives each its own E"
        yield Problem("compress", compress, reason, "set compress: projected or remove per_head")


def _kind(value: Any) -> str:
    return value.get("kind", "block") if isinstance(value, dict) else getattr(value, "kind", "block")


Compression = Annotated[
    Annotated[BlockCompression, Tag("block")]
    | Annotated[PoolCompression, Tag("pool")]
    | Annotated[LinformerCompression, Tag("linformer")],
    Discriminator(_kind),
]
"""One of the three by `kind`; without it, `block`."""
