"""The transformer layer: norms, one of our attention mechanisms between its projections, and the MLP."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from megakernel.attention import AttentionLayer
from megakernel.attention.softmax import SoftmaxAttention
from megakernel.ops.documents import Positions
from megakernel.ops.layers import swiglu
from megakernel.parallel import replicated

from .layer_inputs import LayerInputs
from .linear import apply, column_linear, low_rank_update, row_linear, updated
from .norm import Norm
from .self_attention import SelfAttention
from .settings import ModelSettings, drawn_from


def _geglu_tanh(x: Tensor) -> Tensor:
    """gelu(gate) * up of x (..., 2 F), the gate in its first F columns."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": swiglu,
    "geglu_tanh": _geglu_tanh,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class MLP(nn.Module):
    """Up, activation, down; gate and up are one matrix."""

    def __init__(self, settings: ModelSettings):
        super().__init__()
        model = settings.model
        self.activation = _ACTIVATIONS[model.activation]
        parts = 2 if model.is_mlp_gated else 1
        self.linear_fc1 = column_linear(
            settings,
            model.hidden_size,
            parts * model.ffn_size,
            bias=model.has_mlp_bias,
            skip_bias_add=True,
            stride=parts,
        )
        self.linear_fc2 = row_linear(settings, model.ffn_size, model.hidden_size, bias=model.has_mlp_bias)
        width, inner = model.hidden_size, model.ffn_size
        self.gated = model.is_mlp_gated
        self.gate_update = low_rank_update(settings, "gate", width, inner, "column") if self.gated else None
        self.up_update = low_rank_update(settings, "up", width, inner, "column")
        self.down_update = low_rank_update(settings, "down", inner, width, "row")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x (N, B, C) -> (output (N, B, C), its bias or None)."""
        inner, bias = apply(self.linear_fc1, x)
        if self.gate_update is not None or self.up_update is not None:
            updates = (self.gate_update, self.up_update) if self.gated else (self.up_update,)
            inner = torch.cat(updated(inner.chunk(len(updates), -1), updates, x), -1)
        active = self.activation(inner if bias is None else inner + bias)
        output, bias = apply(self.linear_fc2, active)
        return output if self.down_update is None else output + self.down_update(active), bias


class TransformerLayer(nn.Module):
    """x + attention(norm(x)) = y, then y + mlp(norm(y)), or y + mlp(norm(x)) where the two are parallel.

    With a normalized residual norm(x) + attention(norm(x)) = y. What attention and MLP give may go through a norm of
    its own, beside or in place of that of what they read, and is multiplied by residual_multiplier.
    """

    def __init__(self, settings: ModelSettings, index: int):
        super().__init__()
        self.index = index
        self.recompute = settings.recompute == "full"
        self.offload = settings.offload
        self.mlp_chunk_size = settings.mlp_chunk_size
        self.parallel = settings.model.parallel_residual
        self.normalized = settings.model.normalized_residual
        self.multiplier = settings.model.residual_multiplier
        self.bias_group = settings.mesh.tp.group if settings.mesh.sequence_parallel else None
        with drawn_from(settings.seed, "layer", index):
            before, after = _norms(settings)
            self.attention_norm = before()
            self.self_attention = SelfAttention(settings, index)
            self.attention_post_norm = after()
            self.mlp_norm = before()
            self.mlp = MLP(settings)
            self.mlp_post_norm = after()

    def forward(self, inputs: LayerInputs) -> LayerInputs:
        """Hidden states (N, B, C) to hidden states; the rest of the inputs passes through."""
        hidden, positions, *rest = inputs
        if self.recompute and self.training:
            hidden = recomputed(self._compute, hidden, positions, offload=self.offload)
        else:
            hidden = self._compute(hidden, positions)
        return (hidden, positions, *rest)

    def extend(self, hidden: Tensor, positions: Positions, state: Any) -> tuple[Tensor, Any]:
        """The same for tokens that follow those already in `state` (None: the beginning); returns the new state."""
        residual, normed = self._enter(hidden)
        output, state = self.self_attention.extend(normed, positions, state)
        return self._add_mlp(self._add(residual, output, self.attention_post_norm), hidden), state

    def _compute(self, hidden: Tensor, positions: Tensor) -> Tensor:
        residual, normed = self._enter(hidden)
        output = self.self_attention(normed, positions)
        return self._add_mlp(self._add(residual, output, self.attention_post_norm), hidden)

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
        return self._add(residual, self.mlp(self.mlp_norm(source)), self.mlp_post_norm)

    def _add(self, residual: Tensor, output: tuple[Tensor, Tensor | None], norm: nn.Module) -> Tensor:
        branch, bias = output
        if bias is not None:  # added to sequence shards: each tensor rank's gradient is a part of it
            branch = branch + replicated(bias, self.bias_group)
        branch = norm(branch)
        return residual + (branch if self.multiplier == 1 else branch * self.multiplier)


def _norms(settings: ModelSettings) -> tuple[Callable[[], nn.Module], Callable[[], nn.Module]]:
    """What makes the norms of what attention and MLP read, and of what they give."""
    norm, placement = partial(Norm, settings), settings.model.norm_placement
    return nn.Identity if placement == "after" else norm, nn.Identity if placement == "before" else norm


def attention_cores(model: nn.Module) -> dict[int, AttentionLayer]:
    """Layer, counted from 0 over all pipeline stages -> its mechanism, of the layers that this process holds."""
    layers = [layer for layer in model.modules() if isinstance(layer, TransformerLayer)]
    return {layer.index: layer.self_attention.core for layer in layers}


def converted_cores(model: nn.Module) -> dict[int, AttentionLayer]:
    """`attention_cores` without those that are still full softmax."""
    cores = attention_cores(model)
    return {index: core for index, core in cores.items() if not isinstance(core, SoftmaxAttention)}


def recomputed(
    function: Callable[..., Tensor], hidden: Tensor, positions: Tensor, *, offload: bool
) -> Tensor:
    """`function(hidden, positions)`, of which the arguments alone are kept until backward.

    offload: they wait in pinned host memory. Not DeepSpeed's way of doing that: 0.19.8 empties the tensors it was
    handed, of which its own pipeline engine still holds some.
    """
    if not offload:
        return checkpoint(function, hidden, positions, use_reentrant=False)
    with save_on_cpu(pin_memory=hidden.is_cuda):
        # Only this form saves its arguments as autograd's tensors, which is what the hook moves.
        return checkpoint(function, hidden, positions, use_reentrant=True)
