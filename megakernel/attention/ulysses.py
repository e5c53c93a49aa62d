"""Whole rows of some heads in place of a shard of the rows of all heads: how a layer that needs every token is cut."""

from torch import Tensor

from megakernel.attention.sequence import ContextParallelShard
from megakernel.ops.documents import Positions


class Ulysses:
    """What P shards of N tokens and H heads trade tokens for heads for: all P N tokens of H / P heads (Ulysses).

    The shard that is the whole sequence keeps everything as it is. Key heads that do not divide over the shards are
    repeated for their queries first.
    """

    def __init__(self, cp_shard: ContextParallelShard, num_heads: int, num_kv_heads: int):
        """num_heads and num_kv_heads: those of this process's tokens; ValueError where num_heads does not divide."""
        if num_heads % cp_shard.size:
            raise ValueError(
                f"{num_heads} heads do not divide over {cp_shard.size} shards of the sequence; change one"
            )
        self.cp_shard = cp_shard
        self.repeats = 1 if num_kv_heads % cp_shard.size == 0 else num_heads // num_kv_heads
        each = num_heads // cp_shard.size
        self.query_heads = slice(cp_shard.rank * each, (cp_shard.rank + 1) * each)
        """Which of the query heads are this shard's, for what else belongs to a head."""

    def of_queries(self, q: Tensor) -> Tensor:
        """(B, H, N, d) -> (B, H / P, P N, d)."""
        return self.cp_shard.tokens_to_heads(q)

    def of_keys(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Keys or values (B, H_kv, N, d), or (B, H_kv, M, N, d), -> all tokens of the heads that the queries need."""
        return tuple(self._traded(self._for_queries(x, 1)) for x in tensors)

    def of_key_heads(self, x: Tensor, dim: int = 0) -> Tensor:
        """What every shard holds for all key heads, counted by `dim` -> that of the heads that the queries need."""
        return self._for_queries(x, dim).chunk(self.cp_shard.size, dim)[self.cp_shard.rank]

    def of_positions(self, positions: Positions, tokens: int) -> Positions:
        """Positions (B, N), or that of the first of a shard's `tokens`, -> those of the whole rows."""
        if isinstance(positions, int):
            return positions - self.cp_shard.rank * tokens
        return self.cp_shard.all_tokens(positions[..., None])[..., 0]

    def cut(self, out: Tensor) -> Tensor:
        """The inverse of `of_queries`: this shard's tokens of all heads."""
        return self.cp_shard.heads_to_tokens(out)

    def _for_queries(self, x: Tensor, dim: int) -> Tensor:
        return x if self.repeats == 1 else x.repeat_interleave(self.repeats, dim)

    def _traded(self, x: Tensor) -> Tensor:
        return self.cp_shard.tokens_to_heads(x.flatten(1, -3)).unflatten(1, (-1, *x.shape[2:-2]))
