"""EVA: exact windows beside control variates of chunks (docs/formulas.md, 7)."""

from pydantic import Field

from .section import Section


class Eva(Section):
    """Softmax over the keys of a token's window and one summary (k_c, beta_c) for each chunk of keys."""

    window_size: int = Field(default=64, gt=0)
    """Tokens of a window, w, attended exactly."""

    chunk_size: int = Field(default=16, gt=0)
    """Tokens of a chunk; with compression, chunks are equal shares of the compressed keys, one for each window."""

    overlap: bool = False
    """Windows reach into the neighbouring one, before and (where not causal) after them, for keys."""

    exclude_window: bool = False
    """Leave chunks inside a token's own window out of what it sees; the published form counts them twice."""

    published_padding: bool = False
    """Means of chunks count padding as zeros, as in the published code; outputs then depend on the padding."""
