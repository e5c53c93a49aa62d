"""The MLP of a layer."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from megakernel.ops.layers import swiglu

from .linear import apply, column_linear, row_linear
from .settings import ModelSettings

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": swiglu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class MLP(nn.Module):
    """Up, activation, down; of SwiGLU gate and up are one matrix."""

    def __init__(self, settings: ModelSettings):
        super().__init__()
        model = settings.model
        self.activation = _ACTIVATIONS[model.activation]
        parts = 2 if model.activation == "swiglu" else 1
        self.linear_fc1 = column_linear(
            settings,
            model.hidden_size,
            parts * model.ffn_size,
            bias=model.bias,
            skip_bias_add=True,
            stride=parts,
        )
        self.linear_fc2 = row_linear(settings, model.ffn_size, model.hidden_size, bias=model.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x (N, B, C) -> (output (N, B, C), its bias or None)."""
        inner, bias = apply(self.linear_fc1, x)
        return apply(self.linear_fc2, self.activation(inner if bias is None else inner + bias))
