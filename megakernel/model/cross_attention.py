"""Cross attention of a decoder's layer: queries of its tokens, keys and values of the encoder's."""

from typing import Any

from torch import Tensor, nn

from megakernel import attention
from megakernel.attention.cross import SourceKeys, SourceState, read_again, read_source
from megakernel.parallel.tensor import head_shard, mark_head_parameters

from .dropout import PlacedDropout
from .linear import apply_linear, column_linear, row_linear, stack
from .self_attention import qk_norm
from .settings import ModelSettings


class CrossAttention(nn.Module):
    """Projections of targets to queries and of sources to keys and values, the mechanism, and the output projection.

    The rows of the fused projection of sources are grouped by key head, [its keys | value], so that every tensor rank
    holds whole groups. Nothing is rotated: positions of sources and targets have no common origin.
    """

    def __init__(self, settings: ModelSettings, index: int):
        """index: of the layer, an encoder's layers included."""
        super().__init__()
        model, tp = settings.model, settings.mesh.tp
        assert model.encoder is not None
        assert settings.copies is None, "config.rules keeps a key head on one tensor rank"
        config, width, size = model.encoder.cross_attention, model.hidden_size, model.head_size
        self.tp, self.kv_heads, self.head_dim = tp, model.kv_heads // tp.size, size
        self.keys_per_head = config.keys_per_head
        self.query_scale = model.query_scale
        self.dropout = PlacedDropout.at(model.dropout.attention, "cross attention", index)
        self.query = column_linear(settings, width, model.num_heads * size, bias=model.qkv_bias)
        rows = (self.keys_per_head * size, size)
        self.key_value = column_linear(
            settings, width, model.kv_heads * sum(rows), bias=model.qkv_bias, fan_out=model.kv_heads * size
        )
        stack(self.key_value.weight, rows)
        self.query_norm = qk_norm(settings, model.num_heads)
        self.key_norm = qk_norm(settings, model.kv_heads * self.keys_per_head)
        self.core = attention.build(
            config,
            num_heads=model.num_heads,
            num_kv_heads=model.kv_heads,
            head_dim=size,
            causal=False,
            seed=(settings.seed, model.all_layers + index),
            heads=head_shard(tp),
            rotary=False,
        )
        mark_head_parameters(self.core)
        self.output = row_linear(settings, model.num_heads * size, width, bias=model.bias)

    def forward(
        self, hidden: Tensor, sources: Tensor, real: Tensor, numbers: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """hidden (N, B, C), sources (S, B, C) and which of them are no padding (B, S) -> (output (N, B, C), its bias).

        numbers (B, N): of the targets, for dropout; None: none.
        """
        heads, _ = read_source(self.core, self._queries(hidden), self._source_keys(sources, real))
        return self._project_output(heads, numbers)

    def extend(
        self, hidden: Tensor, sources: Tensor | None, real: Tensor | None, state: SourceState | None
    ) -> tuple[tuple[Tensor, Tensor | None], SourceState]:
        """`forward` for further tokens; also the state, made of the sources in the first call, where it is None."""
        queries = self._queries(hidden)
        if state is None:
            assert sources is not None
            assert real is not None
            heads, state = read_source(self.core, queries, self._source_keys(sources, real))
        else:
            heads = read_again(self.core, queries, state)
        return self._project_output(heads), state

    def _queries(self, hidden: Tensor) -> Tensor:
        """(B, H, N, d), scaled."""
        fused, _ = apply_linear(self.query, hidden)
        q = fused.view(*fused.shape[:2], self.kv_heads, -1, self.head_dim)
        q = q if self.query_norm is None else self.query_norm(q)
        q = q.permute(1, 2, 3, 0, 4).flatten(1, 2)
        return q if self.query_scale == 1 else q * self.query_scale

    def _source_keys(self, sources: Tensor, real: Tensor) -> SourceKeys:
        fused, _ = apply_linear(self.key_value, sources)
        vectors: Any = fused.view(*fused.shape[:2], self.kv_heads, -1, self.head_dim)
        k, v = vectors.split([self.keys_per_head, 1], 3)
        k = k if self.key_norm is None else self.key_norm(k)
        k, v = (part.permute(1, 2, 3, 0, 4) for part in (k, v))
        return SourceKeys(k.squeeze(2) if self.keys_per_head == 1 else k, v.squeeze(2), real)

    def _project_output(self, heads: Tensor, numbers: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """heads (B, H, N, d) through dropout and the projection: (N, B, C), its bias or None."""
        concatenated = heads.permute(2, 0, 1, 3).flatten(2)
        if numbers is not None:
            concatenated = self.dropout(concatenated, numbers.T, self.tp.rank * concatenated.shape[-1])
        return apply_linear(self.output, concatenated.contiguous())
