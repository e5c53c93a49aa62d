"""Whole rows of some heads in place of a piece of the rows of all heads: how a layer that needs every token is cut."""

from torch import Tensor

from megakernel.attention.sequence import SequencePiece
from megakernel.ops.documents import Positions


class WholeRows:
    """What P pieces of N tokens and H heads trade tokens for heads for: all P N tokens of H / P heads (Ulysses).

    The piece that is the whole sequence keeps everything as it is. Key heads that do not divide over the pieces are
    repeated for their queries first.
    """

    def __init__(self, piece: SequencePiece, num_heads: int, num_kv_heads: int):
        """num_heads and num_kv_heads: those of this process's tokens; ValueError where num_heads does not divide."""
        if num_heads % piece.size:
            raise ValueError(
                f"{num_heads} heads do not divide over {piece.size} pieces of the sequence; change one"
            )
        self.piece = piece
        self.repeats = 1 if num_kv_heads % piece.size == 0 else num_heads // num_kv_heads
        each = num_heads // piece.size
        self.query_heads = slice(piece.rank * each, (piece.rank + 1) * each)
        """Which of the query heads are this piece's, for what else belongs to a head."""

    def of_queries(self, q: Tensor) -> Tensor:
        """(B, H, N, d) -> (B, H / P, P N, d)."""
        return self.piece.tokens_to_heads(q)

    def of_keys(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Keys or values (B, H_kv, N, d), or (B, H_kv, M, N, d), -> all tokens of the heads that the queries need."""
        return tuple(self._traded(self._for_queries(x, 1)) for x in tensors)

    def of_key_heads(self, x: Tensor, dim: int = 0) -> Tensor:
        """What every piece holds for all key heads, counted by `dim` -> that of the heads that the queries need."""
        return self._for_queries(x, dim).chunk(self.piece.size, dim)[self.piece.rank]

    def of_positions(self, positions: Positions, tokens: int) -> Positions:
        """Positions (B, N), or that of the first of a piece's `tokens`, -> those of the whole rows."""
        if isinstance(positions, int):
            return positions - self.piece.rank * tokens
        return self.piece.all_tokens(positions[..., None])[..., 0]

    def cut(self, out: Tensor) -> Tensor:
        """The inverse of `of_queries`: this piece's tokens of all heads."""
        return self.piece.heads_to_tokens(out)

    def _for_queries(self, x: Tensor, dim: int) -> Tensor:
        return x if self.repeats == 1 else x.repeat_interleave(self.repeats, dim)

    def _traded(self, x: Tensor) -> Tensor:
        return self.piece.tokens_to_heads(x.flatten(1, -3)).unflatten(1, (-1, *x.shape[2:-2]))
