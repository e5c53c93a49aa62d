"""The transformer layer: norms, attention with its projections, and the MLP."""

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

from .compiled import compiled, has_hooks
from .dropout import PlacedDropout, own_tokens
from .layer_inputs import LayerInputs, numbers_of
from .linear import add_updates, apply_linear, column_linear, low_rank_update, row_linear, stack
from .norm import Norm
from .self_attention import SelfAttention
from .settings import ModelSettings, seeded_by


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
    """Up projection, activation, down projection; gate and up are one matrix."""

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
        stack(self.linear_fc1.weight, [model.ffn_size] * parts)
        self.linear_fc2 = row_linear(settings, model.ffn_size, model.hidden_size, bias=model.has_mlp_bias)
        width, inner = model.hidden_size, model.ffn_size
        self.gated = model.is_mlp_gated
        self.gate_update = low_rank_update(settings, "gate", width, inner, "column") if self.gated else None
        self.up_update = low_rank_update(settings, "up", width, inner, "column")
        self.down_update = low_rank_update(settings, "down", inner, width, "row")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x (N, B, C) -> (output (N, B, C), its bias or None)."""
        inner, bias = apply_linear(self.linear_fc1, x)
        if self.gate_update is not None or self.up_update is not None:
            updates = (self.gate_update, self.up_update) if self.gated else (self.up_update,)
            inner = torch.cat(add_updates(inner.chunk(len(updates), -1), updates, x), -1)
        active = self.activation(inner if bias is None else inner + bias)
        output, bias = apply_linear(self.linear_fc2, active)
        return output if self.down_update is None else output + self.down_update(active), bias


class TransformerLayer(nn.Module):
    """y = x + attention(norm(x)), then y + mlp(norm(y)); with parallel_residual y + mlp(norm(x)).

    With normalized_residual y = norm(x) + attention(norm(x)). norm_placement says whether the norms apply to the inputs
    or outputs of attention and MLP, or both; the outputs are multiplied by residual_multiplier.
    """

    def __init__(self, settings: ModelSettings, index: int):
        super().__init__()
        self.index = index
        self.is_compiled = settings.compile
        self.recompute = settings.recompute == "full"
        self.offload = settings.offload
        self.mlp_chunk_size = settings.mlp_chunk_size
        self.parallel = settings.model.parallel_residual
        self.normalized = settings.model.normalized_residual
        self.multiplier = settings.model.residual_multiplier
        self.bias_group = settings.mesh.tp.group if settings.mesh.sequence_parallel else None
        self.mesh = settings.mesh
        probability = settings.model.dropout.residual
        self.attention_dropout = PlacedDropout.at(probability, "residual of attention", index)
        self.mlp_dropout = PlacedDropout.at(probability, "residual of the MLP", index)
        with seeded_by(settings.seed, "layer", index):
            before, after = norms(settings)
            self.attention_norm = before()
            self.self_attention = SelfAttention(settings, index)
            self.attention_post_norm = after()
            self.mlp_norm = before()
            self.mlp = MLP(settings)
            self.mlp_post_norm = after()

    @property
    def matrices(self) -> list[Any]:
        """The linear layers whose weights are whole matrices, without those of the attention mechanism."""
        attention, mlp = self.self_attention, self.mlp
        gate = [] if attention.output_gate is None else [attention.output_gate]
        return [attention.qkv, *gate, attention.output, mlp.linear_fc1, mlp.linear_fc2]

    def forward(self, inputs: LayerInputs) -> LayerInputs:
        """Hidden states (N, B, C) to hidden states; the other inputs pass through."""
        hidden, positions, *rest = inputs
        numbers = numbers_of(inputs) if self.training else None
        compute = self._compute
        # Hooks see the parts of a layer only as it runs uncompiled.
        if self.is_compiled and not has_hooks(self):
            if self.self_attention.rotary is not None:
                self.self_attention.rotary.prepare(hidden.device)
            compute = partial(compiled(TransformerLayer._compute, self.self_attention.traced), self)
        if self.recompute and self.training and self._has_gradients(hidden):
            hidden = recomputed(compute, hidden, positions, numbers, offload=self.offload)
        else:
            hidden = compute(hidden, positions, numbers)
        return (hidden, positions, *rest)

    def _has_gradients(self, hidden: Tensor) -> bool:
        """Whether backward passes through this layer, unlike through frozen layers before the first trained one."""
        return hidden.requires_grad or any(parameter.requires_grad for parameter in self.parameters())

    def extend(self, hidden: Tensor, positions: Positions, state: Any) -> tuple[Tensor, Any]:
        """`forward` for tokens that continue those in `state` (None: start a sequence); also the new state."""
        residual, normed = self._pre_norm(hidden)
        output, state = self.self_attention.extend(normed, positions, state)
        return self._add_both(residual, output, hidden), state

    def _compute(self, hidden: Tensor, positions: Tensor, numbers: Tensor | None) -> Tensor:
        residual, normed = self._pre_norm(hidden)
        attention = self.self_attention(normed, positions, numbers)
        return self._add_both(residual, attention, hidden, own_tokens(numbers, self.mesh))

    def _pre_norm(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The residual that attention's output is added to, and attention's input."""
        if isinstance(self.attention_norm, Norm) and not self.normalized:
            return self.attention_norm.and_residual(hidden)
        normed = self.attention_norm(hidden)
        return normed if self.normalized else hidden, normed

    def _add_both(
        self,
        residual: Tensor,
        attention: tuple[Tensor, Tensor | None],
        layer_input: Tensor,
        numbers: Tensor | None = None,
        norm: nn.Module | None = None,
        dropout: PlacedDropout | None = None,
    ) -> Tensor:
        """The residual plus attention's output and the MLP's. numbers (N, B): of the tokens, for dropout.

        norm, dropout: of attention's output; None: those of self-attention.
        """
        branch, size = self._branch(attention, norm or self.attention_post_norm), self.mlp_chunk_size
        if numbers is not None:
            branch = (dropout or self.attention_dropout)(branch, numbers)
        is_whole = size is None or size >= len(residual)
        if is_whole and not self.parallel and isinstance(self.mlp_norm, Norm):
            residual, normed = self.mlp_norm.of_sum(residual, branch)
            branch = self._branch(self.mlp(normed), self.mlp_post_norm)
            return residual + (branch if numbers is None else self.mlp_dropout(branch, numbers))
        residual = residual + branch
        source = layer_input if self.parallel else residual
        if is_whole:
            return self._mlp_of(residual, source, numbers)
        # Without gradients, a checkpoint only runs its function.
        run = partial(checkpoint, self._mlp_of, use_reentrant=False)
        # Each token's MLP is independent, so chunks of tensor ranks need not hold the same tokens.
        parts = [residual, source] if numbers is None else [residual, source, numbers]
        return torch.cat([run(*chunk) for chunk in zip(*(part.split(size) for part in parts))])

    def _mlp_of(self, residual: Tensor, source: Tensor, numbers: Tensor | None = None) -> Tensor:
        branch = self._branch(self.mlp(self.mlp_norm(source)), self.mlp_post_norm)
        return residual + (branch if numbers is None else self.mlp_dropout(branch, numbers))

    def _branch(self, output: tuple[Tensor, Tensor | None], norm: nn.Module) -> Tensor:
        """What is added to the residual."""
        branch, bias = output
        if bias is not None:  # added to sequence shards: each tensor rank has part of its gradient
            branch = branch + replicated(bias, self.bias_group)
        branch = norm(branch)
        return branch if self.multiplier == 1 else branch * self.multiplier


def norms(settings: ModelSettings) -> tuple[Callable[[], nn.Module], Callable[[], nn.Module]]:
    """Constructors of the norms of the inputs, and of the outputs, of attention and MLP."""
    norm, placement = partial(Norm, settings), settings.model.norm_placement
    return nn.Identity if placement == "after" else norm, nn.Identity if placement == "before" else norm


def layer_matrices(model: nn.Module) -> list[Any]:
    """`TransformerLayer.matrices` of all layers that this rank holds."""
    layers = [layer for layer in model.modules() if isinstance(layer, TransformerLayer)]
    return [linear for layer in layers for linear in layer.matrices]


def attention_cores(model: nn.Module) -> dict[int, AttentionLayer]:
    """Layer index over all pipeline stages -> mechanism, of the layers that this rank holds."""
    layers = [layer for layer in model.modules() if isinstance(layer, TransformerLayer)]
    return {layer.index: layer.self_attention.core for layer in layers}


def converted_cores(model: nn.Module) -> dict[int, AttentionLayer]:
    """`attention_cores` without those that are still full softmax."""
    cores = attention_cores(model)
    return {index: core for index, core in cores.items() if not isinstance(core, SoftmaxAttention)}


def recomputed(
    function: Callable[..., Tensor], hidden: Tensor, *rest: Tensor | None, offload: bool
) -> Tensor:
    """`function(hidden, *rest)` with activation checkpointing: backward recomputes it from the arguments.

    offload: keep `hidden` in pinned host memory. DeepSpeed 0.19.8's own offload empties tensors that its pipeline
    engine still holds. The rest stay where they are: tables are cached for the positions themselves, not for a copy.
    """
    if not offload:
        return checkpoint(function, hidden, *rest, use_reentrant=False)
    if torch.is_grad_enabled() and not hidden.requires_grad:
        # The reentrant form has gradients only if an argument has them; behind a frozen embedding, none has.
        hidden = hidden.detach().requires_grad_()
    with save_on_cpu(pin_memory=hidden.is_cuda):
        # Only the reentrant form saves its arguments through autograd, whose hooks save_on_cpu uses.
        return checkpoint(lambda states: function(states, *rest), hidden, use_reentrant=True)
