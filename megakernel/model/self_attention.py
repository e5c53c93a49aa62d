"""Self-attention: projections from Megatron's (N, B, C) to an attention mechanism's (B, H, N, d), and back."""

import re
from collections.abc import Sequence
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
from megakernel.ops.joined import split_heads
from megakernel.parallel.axis import Axis
from megakernel.parallel.tensor import gathered, head_shard, mark_head_parameters

from . import compressed_input
from .compiled import outside_graphs, uncompiled
from .dropout import PlacedDropout
from .linear import (
    KeyHeadLinear,
    add_updates,
    apply_linear,
    column_linear,
    low_rank_update,
    row_linear,
    stack,
)
from .norm import AllHeadsNorm, HeadNorm
from .settings import ModelSettings
from .short_convolution import ShortConvolution

MECHANISM = ".self_attention.core."
"""Part of the names of a self-attention mechanism's own parameters."""

_MECHANISMS = re.compile(r"\.(self|cross)_attention\.core\.")
"""Matches names of all mechanisms' own parameters."""

_OPTIONAL_PARTS = re.compile(r"\.self_attention\.(further|short_convolution|output_norm|output_gate)\.")
"""Matches names of the optional parts around a mechanism."""

UPDATES = re.compile(r"\.(self_attention|mlp)\.\w+_update\.")
"""Matches names of low-rank updates."""


def set_rotary(layers: nn.Module, model: Model) -> None:
    """Set the rotary frequencies of all layers from this model section."""
    shared: list[tuple[Any, attention.Rotary | None]] = []
    for layer in layers.modules():
        if isinstance(layer, SelfAttention):
            rope = model.layer_rope(layer.index)
            # Layers with equal frequencies share one Rotary and its tables.
            if (entry := next((entry for entry in shared if entry[0] == rope), None)) is None:
                shared.append(entry := (rope, _rotary(model, layer.index)))
            layer.rotary = entry[1]


def _rotary(model: Model, index: int) -> attention.Rotary | None:
    rope = model.layer_rope(index)
    return None if rope is None else attention.Rotary(model.rotary_size, *rope)


class SelfAttention(nn.Module):
    """Query, key and value projections, the layer's mechanism, and the output projection.

    The rows of the fused projection are grouped by key head, [its queries | keys | value], so that every tensor rank
    holds whole groups. With fewer key heads than tensor ranks, the ranks of a group share its rows: each has some of
    its queries, and computes a part of its keys and values, which are then gathered. Everything else that a key head
    owns is copied on these ranks, and its gradient summed over them.
    """

    def __init__(self, settings: ModelSettings, index: int):
        super().__init__()
        model, mesh = settings.model, settings.mesh
        self.mesh, self.index = mesh, index
        self.head_dim = model.head_size
        copies, config = settings.copies, model.layer_attention(index)
        self.copies_group, sharing = (copies.group if copies else None), (copies.size if copies else 1)
        self.kv_heads = model.kv_heads * sharing // mesh.tp.size
        self.keys_per_head = config.keys_per_head
        group = (model.num_heads // model.kv_heads, self.keys_per_head, 1)
        self.per_key_head = (group[0] // sharing, *group[1:])
        """Queries, keys and values per key head on this rank."""
        parts = tuple(vectors * model.head_size for vectors in group)
        self.rows = tuple(size // sharing for size in parts)
        """Rows of the fused projection per key head on this rank: of queries, keys and values."""
        self.cp_shard = mesh.new_cp_shard()
        self.isolate_documents = settings.isolate_documents
        # A decoder's padding stands behind its tokens, which do not see it, but the M-step counts queries.
        counts_queries = config.mixture is not None and config.mixture.m_step
        pads_targets = model.encoder is not None and counts_queries
        self.pads = model.classifier is not None or index < model.encoder_layers or pads_targets
        self.recompute = settings.recompute == "selective"
        self.traced = outside_graphs(config, self.cp_shard.size) is None
        """Whether torch.compile takes the mechanism into the layer's graph."""
        self._uncompiled = uncompiled(SelfAttention._attend) if settings.compile and not self.traced else None
        self.rotary = _rotary(model, index)
        self.query_scale = model.query_scale
        self.dropout = PlacedDropout.at(model.dropout.attention, "attention", index)
        heads = model.num_heads + (self.keys_per_head + 1) * model.kv_heads
        self.qkv = column_linear(
            settings,
            model.hidden_size,
            heads * model.head_size,
            bias=model.qkv_bias,
            fan_out=model.num_heads * model.head_size,
            parts=parts if copies else (),
        )
        stack(self.qkv.weight, parts)
        self.further, further = None, config.spec.further
        if further and copies:
            self.further = KeyHeadLinear(settings, model.hidden_size, further)
        elif further:
            self.further = column_linear(settings, model.hidden_size, further * model.kv_heads, bias=False)
        self.query_norm = qk_norm(settings, model.num_heads)
        self.key_norm = qk_norm(settings, model.kv_heads * self.keys_per_head, copies)
        self.short_convolution = None
        if config.short_convolution is not None:
            self.short_convolution = ShortConvolution(settings, index, config.short_convolution)
        self.output_norm = HeadNorm(settings) if config.output_norm else None
        self.output_gate = None
        if config.output_gate is not None:
            self.gate_activation = F.silu if config.output_gate == "silu" else torch.sigmoid
            gates = model.num_heads * model.head_size
            self.output_gate = column_linear(settings, model.hidden_size, gates, bias=False)
        self.core = attention.build(
            config,
            num_heads=model.num_heads,
            num_kv_heads=model.kv_heads,
            head_dim=model.head_size,
            causal=model.is_causal_layer(index),
            max_positions=model.max_positions,
            seed=(settings.seed, index),
            heads=head_shard(mesh.tp, copies),
            softmax_exchange=mesh.softmax_exchange,
            rotary=self.rotary is not None,
        )
        mark_head_parameters(self.core, sharing)
        self.output = row_linear(
            settings, model.num_heads * model.head_size, model.hidden_size, bias=model.bias
        )
        width, size = model.hidden_size, model.head_size
        keys = self.keys_per_head * model.kv_heads
        self.query_update = low_rank_update(settings, "query", width, model.num_heads * size, "column")
        self.key_update = low_rank_update(settings, "key", width, keys * size, "column")
        self.value_update = low_rank_update(settings, "value", width, model.kv_heads * size, "column")
        self.output_update = low_rank_update(settings, "output", model.num_heads * size, width, "row")

    def forward(
        self, hidden: Tensor, positions: Tensor, numbers: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """hidden (N, B, C), positions (B, N) -> (output (N, B, C), its bias or None).

        numbers (B, N): of the tokens, for dropout; None: none.
        """
        inputs = AttentionInputs(
            # Without positions, ops treat each sequence as one document, without copies.
            positions if self.isolate_documents else None,
            padding_mask=positions >= 0 if self.pads else None,
            rotary=self.rotary,
            cp_shard=self.cp_shard,
            further=self._further(hidden),
        )
        vectors = self._project(hidden, inputs)
        recompute = self.recompute and self.training
        if self._uncompiled is None:
            heads = self._attend(vectors, inputs, recompute)
        else:
            heads = self._uncompiled(self, vectors, inputs, recompute)
        return self._project_output(heads, hidden, numbers)

    def _attend(self, vectors: Sequence[Tensor], inputs: AttentionInputs, recompute: bool = False) -> Tensor:
        """The mechanism's outputs (B, H, N, d) for what `_project` returns."""
        if recompute:
            return checkpoint(self._attend, vectors, inputs, use_reentrant=False)
        if self.short_convolution is not None:
            vectors = [self.short_convolution(_packed(vectors), inputs)]
        return self.core(*self._by_heads(vectors), inputs)

    def extend(
        self, hidden: Tensor, positions: Positions, state: Any
    ) -> tuple[tuple[Tensor, Tensor | None], Any]:
        """`forward` for tokens that continue those in `state`; also the new state.

        state: the mechanism's; with a short convolution the pair (mechanism's, convolution's). None: start a sequence.
        """
        core_state, conv_state = (state, None) if self.short_convolution is None else state or (None, None)
        inputs = AttentionInputs(
            positions, rotary=self.rotary, further=self._further(hidden), state=core_state
        )
        vectors = self._project(hidden, inputs)
        if self.short_convolution is None:
            heads, state = self.core.attend(*self._by_heads(vectors), inputs)
        else:
            channels = _packed(vectors)
            convolved = self.short_convolution(channels, AttentionInputs(positions, state=conv_state))
            heads, core_state = self.core.attend(*self._by_heads([convolved]), inputs)
            state = core_state, self.short_convolution.next_state(channels, conv_state)
        return self._project_output(heads, hidden), state

    def _further(self, hidden: Tensor) -> Tensor | None:
        """(B, H_kv, N, n): the mechanism's further projection, such as decay logits; None if it has none."""
        if self.further is None:
            return None
        fused, _ = apply_linear(self.further, hidden)
        return fused.unflatten(-1, (self.kv_heads, -1)).permute(1, 2, 0, 3)

    def _project(self, hidden: Tensor, inputs: AttentionInputs) -> Sequence[Tensor]:
        """Queries, keys and values (N, B, H_kv, vectors per key head, d), or the projection that holds all three."""
        if isinstance(self.core, LowRankAttention) and self.core.compresses_input:
            parts = compressed_input.project(
                hidden, self.qkv.weight, self.qkv.bias, self.rows, self.core, self.mesh, inputs
            )
            return self._vectors(parts)
        fused, _ = apply_linear(self.qkv, hidden)
        updates = (self.query_update, self.key_update, self.value_update)
        is_plain = self.query_norm is None and all(update is None for update in updates)
        if is_plain and self.copies_group is None:
            return [fused.view(*fused.shape[:2], self.kv_heads, -1, self.head_dim)]
        fused = fused.view(*fused.shape[:2], self.kv_heads, sum(self.rows))
        q, k, v = self._vectors(
            add_updates(
                fused.split(self.rows, dim=3),
                updates,
                hidden,
                lambda update: update.unflatten(-1, (self.kv_heads, -1)),
            )
        )
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        return [q, k, v]

    def _vectors(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Queries, keys and values (N, B, H_kv, rows) -> (N, B, H_kv, vectors per key head, d), gathered if shared."""
        q, k, v = parts
        if self.copies_group is not None:
            both = gathered(torch.cat([k, v], -1), self.copies_group)
            shares = both.unflatten(-1, (-1, k.shape[-1] + v.shape[-1])).split(self.rows[1:], -1)
            k, v = (share.flatten(-2) for share in shares)
        return [part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v)]

    def _by_heads(self, vectors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """What `_project` returns as q (B, H, N, d) and k and v (B, H_kv, N, d), or k (B, H_kv, M, N, d); q scaled."""
        if len(vectors) == 1:
            # Split before the dimensions move, so that backward has the gradients in the projection's layout.
            vectors = split_heads(vectors[0], self.per_key_head)
        q, k, v = [part.permute(1, 2, 3, 0, 4) for part in vectors]
        q = q.flatten(1, 2)
        if self.query_scale != 1:
            q = q * self.query_scale
        return q, k.squeeze(2) if self.keys_per_head == 1 else k, v.squeeze(2)

    def _project_output(
        self, heads: Tensor, hidden: Tensor, numbers: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """heads (B, H, N, d), through the output's norm, gate, dropout and projection: (N, B, C), its bias or None."""
        if self.output_norm is not None:
            heads = self.output_norm(heads)
        concatenated = heads.permute(2, 0, 1, 3).flatten(2)
        if self.output_gate is not None:
            gates, _ = apply_linear(self.output_gate, hidden)
            concatenated = concatenated * self.gate_activation(gates)
        if numbers is not None:
            first_channel = self.mesh.tp.rank * concatenated.shape[-1]
            concatenated = self.dropout(concatenated, numbers.T, first_channel)
        # Once: the product would copy strided tokens in forward, and in backward again.
        concatenated = concatenated.contiguous()
        output, bias = apply_linear(self.output, concatenated)
        return output if self.output_update is None else output + self.output_update(concatenated), bias


def _packed(vectors: Sequence[Tensor]) -> Tensor:
    """One tensor of what `_project` returns, a copy if that is three."""
    return vectors[0] if len(vectors) == 1 else torch.cat(list(vectors), 3)


def qk_norm(settings: ModelSettings, heads: int, copies: Axis | None = None) -> nn.Module | None:
    """The norm of queries or keys (`heads` of the whole layer) that model.qk_norm asks for; None: there is none."""
    if not settings.model.qk_norm:
        return None
    return (
        AllHeadsNorm(settings, heads, copies) if settings.model.qk_norm_width == "all" else HeadNorm(settings)
    )


def absent_in_dense(name: str) -> bool:
    """Whether dense models lack this weight: it belongs to a mechanism, a part around it, or a low-rank update."""
    return any(of.search(name) for of in (_OPTIONAL_PARTS, UPDATES)) or is_of_mechanism(name)


def is_of_mechanism(name: str) -> bool:
    """Whether an attention mechanism owns this weight."""
    return _MECHANISMS.search(name) is not None
