"""Projections around an attention mechanism: the bridge from Megatron's (N, B, C) to the mechanisms' (B, H, N, d)."""

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megakernel import attention
from megakernel.attention import AttentionInputs
from megakernel.attention.low_rank import LowRankAttention
from megakernel.config import Model
from megakernel.ops.documents import Positions
from megakernel.parallel.tensor import head_shard, mark_head_parameters

from . import compressed_input
from .linear import apply, column_linear, low_rank_update, row_linear, updated
from .norm import AllHeadsNorm, HeadNorm
from .settings import ModelSettings
from .short_convolution import ShortConvolution

MECHANISM = ".self_attention.core."
"""In the names of what an attention mechanism owns."""

_AROUND = re.compile(r"\.self_attention\.(further|short_convolution|output_norm|output_gate)\.")
"""In the names of what a mechanism has around it."""

UPDATES = re.compile(r"\.(self_attention|mlp)\.\w+_update\.")
"""In the names of low-rank updates."""


def rotate_by(layers: nn.Module, model: Model) -> None:
    """Let all layers rotate by the frequencies that this model section names; nothing else of it is looked at."""
    made: list[tuple[Any, attention.Rotary | None]] = []
    for layer in layers.modules():
        if isinstance(layer, SelfAttention):
            rope = model.layer_rope(layer.index)
            # Layers that rotate alike share the tables that they make.
            if (found := next((one for one in made if one[0] == rope), None)) is None:
                made.append(found := (rope, _rotary(model, layer.index)))
            layer.rotary = found[1]


def _rotary(model: Model, index: int) -> attention.Rotary | None:
    rope = model.layer_rope(index)
    return None if rope is None else attention.Rotary(model.rotary_size, *rope)


class SelfAttention(nn.Module):
    """Query, key and value projections, the layer's mechanism, and the output projection.

    The rows of the fused projection are grouped by key head, [its queries | keys | value], so that a cut between
    tensor ranks is a cut between key heads and every rank holds whole groups.
    """

    def __init__(self, settings: ModelSettings, index: int):
        super().__init__()
        model, mesh = settings.model, settings.mesh
        self.mesh, self.index = mesh, index
        self.head_dim = model.head_size
        self.kv_heads = model.kv_heads // mesh.tp.size
        self.queries_per_key = model.num_heads // model.kv_heads
        form = model.layer_attention(index)
        self.keys_per_head = form.keys_per_head
        self.cp_shard = mesh.new_cp_shard()
        self.isolate_documents = settings.isolate_documents
        self.pads = model.classifier is not None
        self.recompute = settings.recompute == "selective"
        self.rotary = _rotary(model, index)
        self.query_scale = model.query_scale
        heads = model.num_heads + (self.keys_per_head + 1) * model.kv_heads
        self.qkv = column_linear(settings, model.hidden_size, heads * model.head_size, bias=model.qkv_bias)
        self.further = None
        further = form.spec.further * model.kv_heads
        if further:
            self.further = column_linear(settings, model.hidden_size, further, bias=False)
        self.query_norm = _qk_norm(settings, model.num_heads)
        self.key_norm = _qk_norm(settings, model.kv_heads * self.keys_per_head)
        self.short_convolution = None
        if form.short_convolution is not None:
            self.short_convolution = ShortConvolution(settings, index, form.short_convolution)
        self.output_norm = HeadNorm(settings) if form.output_norm else None
        self.output_gate = None
        if form.output_gate is not None:
            self.gate_activation = F.silu if form.output_gate == "silu" else torch.sigmoid
            gates = model.num_heads * model.head_size
            self.output_gate = column_linear(settings, model.hidden_size, gates, bias=False)
        self.core = attention.build(
            form,
            num_heads=model.num_heads,
            num_kv_heads=model.kv_heads,
            head_dim=model.head_size,
            causal=model.is_causal,
            max_positions=model.max_positions,
            seed=(settings.seed, index),
            heads=head_shard(mesh.tp),
            softmax_exchange=mesh.softmax_exchange,
        )
        mark_head_parameters(self.core)
        self.output = row_linear(
            settings, model.num_heads * model.head_size, model.hidden_size, bias=model.bias
        )
        width, size = model.hidden_size, model.head_size
        keys = self.keys_per_head * model.kv_heads
        self.query_update = low_rank_update(settings, "query", width, model.num_heads * size, "column")
        self.key_update = low_rank_update(settings, "key", width, keys * size, "column")
        self.value_update = low_rank_update(settings, "value", width, model.kv_heads * size, "column")
        self.output_update = low_rank_update(settings, "output", model.num_heads * size, width, "row")

    def forward(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """hidden (N, B, C), positions (B, N) -> (output (N, B, C), its bias or None)."""
        inputs = AttentionInputs(
            # Without documents to look for, the ops work on views of whole sequences.
            positions if self.isolate_documents else None,
            padding_mask=positions >= 0 if self.pads else None,
            rotary=self.rotary,
            cp_shard=self.cp_shard,
            further=self._further(hidden),
        )
        q, k, v = self._project(hidden, inputs)
        if self.recompute and self.training:
            heads = checkpoint(self._mix, q, k, v, inputs, use_reentrant=False)
        else:
            heads = self._mix(q, k, v, inputs)
        return self._merge(heads, hidden)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> Tensor:
        if self.short_convolution is not None:
            q, k, v, _ = self.short_convolution(q, k, v, inputs)
        return self.core(self._scaled(q), k, v, inputs)

    def extend(
        self, hidden: Tensor, positions: Positions, state: Any
    ) -> tuple[tuple[Tensor, Tensor | None], Any]:
        """`forward` for tokens that follow those in `state`; also the state that includes them.

        state: the mechanism's own; with a short convolution a pair of that and the convolution's.
        """
        own, before = (state, None) if self.short_convolution is None else state or (None, None)
        inputs = AttentionInputs(positions, rotary=self.rotary, further=self._further(hidden), state=own)
        q, k, v = self._project(hidden, inputs)
        if self.short_convolution is None:
            heads, state = self.core.attend(self._scaled(q), k, v, inputs)
        else:
            q, k, v, before = self.short_convolution(q, k, v, AttentionInputs(positions, state=before))
            heads, own = self.core.attend(self._scaled(q), k, v, inputs)
            state = own, before
        return self._merge(heads, hidden), state

    def _further(self, hidden: Tensor) -> Tensor | None:
        """(B, H_kv, N, n), what the mechanism asks for besides queries, keys and values."""
        if self.further is None:
            return None
        fused, _ = apply(self.further, hidden)
        return fused.unflatten(-1, (self.kv_heads, -1)).permute(1, 2, 0, 3)

    def _project(self, hidden: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
        parts = (self.queries_per_key, self.keys_per_head, 1)
        if isinstance(self.core, LowRankAttention) and self.core.compresses_input:
            return compressed_input.project(hidden, self.qkv.weight, parts, self.core, self.mesh, inputs)
        fused, _ = apply(self.qkv, hidden)
        tokens, batch, _ = fused.shape
        groups = fused.view(tokens, batch, self.kv_heads, sum(parts), self.head_dim)
        updates = (self.query_update, self.key_update, self.value_update)
        q, k, v = updated(groups.permute(1, 2, 3, 0, 4).split(parts, dim=2), updates, hidden, self._by_heads)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        return q.flatten(1, 2), k.squeeze(2) if self.keys_per_head == 1 else k, v.squeeze(2)

    def _scaled(self, q: Tensor) -> Tensor:
        return q if self.query_scale == 1 else q * self.query_scale

    def _by_heads(self, x: Tensor) -> Tensor:
        """(N, B, heads x d) -> (B, H_kv, heads of each key head, N, d)."""
        return x.unflatten(-1, (self.kv_heads, -1, self.head_dim)).permute(1, 2, 3, 0, 4)

    def _merge(self, heads: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.output_norm is not None:
            heads = self.output_norm(heads)
        merged = heads.permute(2, 0, 1, 3).flatten(2)
        if self.output_gate is not None:
            gates, _ = apply(self.output_gate, hidden)
            merged = merged * self.gate_activation(gates)
        output, bias = apply(self.output, merged)
        return output if self.output_update is None else output + self.output_update(merged), bias


def _qk_norm(settings: ModelSettings, heads: int) -> nn.Module | None:
    if not settings.model.qk_norm:
        return None
    return AllHeadsNorm(settings, heads) if settings.model.qk_norm_width == "all" else HeadNorm(settings)


def is_new(name: str) -> bool:
    """Whether a dense model has no weight of this name: it belongs to an attention mechanism or a low-rank update."""
    return any(of.search(name) for of in (_AROUND, UPDATES)) or MECHANISM in name
