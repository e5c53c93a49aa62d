"""The transformer layer: Megatron-core's parallel projections and MLP around one of our attention mechanisms."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megakernel.ops.layers import swiglu
from megakernel.parallel import replicated

from .linear import column_linear, row_linear
from .norm import Norm
from .recompute import recomputed
from .self_attention import SelfAttention, SelfAttentionSubmodules
from .settings import ModelSettings, drawn_from
from .stream import Stream


@dataclass
class LayerSubmodules:
    """The replaceable parts of a layer."""

    attention_norm: ModuleSpec | type
    self_attention: ModuleSpec | type
    mlp_norm: ModuleSpec | type
    mlp: ModuleSpec | type


def layer_spec(settings: ModelSettings) -> ModuleSpec:
    """The layer as a Megatron-core spec; a variant replaces a part."""
    column, row = column_linear(settings), row_linear(settings)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=LayerSubmodules(
            attention_norm=Norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                submodules=SelfAttentionSubmodules(qkv=column, output=row),
            ),
            mlp_norm=Norm,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(linear_fc1=column, activation_func=swiglu, linear_fc2=row),
            ),
        ),
    )


class TransformerLayer(nn.Module):
    """x + attention(norm(x)) = y, then y + mlp(norm(y)), or y + mlp(norm(x)) where the two are parallel.

    With a normalized residual norm(x) + attention(norm(x)) = y.
    """

    def __init__(self, settings: ModelSettings, index: int, submodules: LayerSubmodules):
        super().__init__()
        self.index = index
        self.recompute = settings.recompute == "full"
        self.offload = settings.offload
        self.mlp_chunk_size = settings.mlp_chunk_size
        self.parallel = settings.model.parallel_residual
        self.normalized = settings.model.normalized_residual
        self.bias_group = settings.mesh.tp.group if settings.mesh.sequence_parallel else None
        transformer = settings.transformer
        with drawn_from(settings.seed, "layer", index):
            self.attention_norm = build_module(submodules.attention_norm, settings)
            self.self_attention = build_module(submodules.self_attention, settings=settings, index=index)
            self.mlp_norm = build_module(submodules.mlp_norm, settings)
            self.mlp = build_module(
                submodules.mlp,
                config=transformer,
                ffn_hidden_size=transformer.ffn_hidden_size,
                tp_group=settings.mesh.tp.group,
            )

    def forward(self, stream: Stream) -> Stream:
        """Hidden states (N, B, C) to hidden states; the rest of the stream passes through."""
        hidden, positions, *rest = stream
        if self.recompute and self.training:
            hidden = recomputed(self._compute, hidden, positions, offload=self.offload)
        else:
            hidden = self._compute(hidden, positions)
        return (hidden, positions, *rest)

    def extend(self, hidden: Tensor, positions: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The same for tokens that follow those already in `state` (None: the beginning); returns the new state."""
        residual, normed = self._enter(hidden)
        output, state = self.self_attention.extend(normed, positions, state)
        return self._add_mlp(self._add(residual, output), hidden), state

    def _compute(self, hidden: Tensor, positions: Tensor) -> Tensor:
        residual, normed = self._enter(hidden)
        return self._add_mlp(self._add(residual, self.self_attention(normed, positions)), hidden)

    def _enter(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention is added to, and what it reads."""
        normed = self.attention_norm(hidden)
        return normed if self.normalized else hidden, normed

    def _add_mlp(self, attended: Tensor, entered: Tensor) -> Tensor:
        source = entered if self.parallel else attended
        size = self.mlp_chunk_size
        if size is None or size >= len(source) or not (self.training and torch.is_grad_enabled()):
            return self._mlp_of(attended, source)
        # A token's MLP needs no other token, whichever tokens the chunks of other tensor ranks hold.
        chunks = zip(attended.split(size), source.split(size))
        return torch.cat([checkpoint(self._mlp_of, *chunk, use_reentrant=False) for chunk in chunks])

    def _mlp_of(self, residual: Tensor, source: Tensor) -> Tensor:
        return self._add(residual, self.mlp(self.mlp_norm(source)))

    def _add(self, residual: Tensor, output: tuple[Tensor, Tensor | None]) -> Tensor:
        branch, bias = output
        if bias is not None:  # added to sequence shards: each tensor rank's gradient is a part of it
            branch = branch + replicated(bias, self.bias_group)
        return residual + branch
