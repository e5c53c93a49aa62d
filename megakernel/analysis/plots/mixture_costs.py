"""Operations and parameters of attention with mixture keys over those of softmax with M times the heads.

Transformer-MGK, figure 3, with the run's heads and keys, over widths and lengths. An input is as wide as the heads of
softmax together.
"""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from megakernel.analysis.mixture_cost import (
    mixture_operations,
    mixture_parameters,
    softmax_operations,
    softmax_parameters,
)
from megakernel.config import Model

from .drawing import lines
from .subject import Subject
from .table import Row

WIDTHS = tuple(2**n for n in range(4, 10))
TOKENS = tuple(2**n for n in range(8, 15))


def measure(subject: Subject) -> list[Row]:
    """See `ratios`."""
    return ratios(subject.config.model)


def draw(rows: Sequence[Row]) -> Mapping[str, Figure]:
    """Ratios by the width of a head, a line for each length."""
    return {
        "operations": lines(rows, "width", "operations", "tokens", log_x=True),
        "parameters": lines(rows, "width", "parameters", log_x=True),
    }


def ratios(model: Model) -> list[Row]:
    """tokens N, width D of a head, operations and parameters: of H heads with M keys over M H heads of softmax."""
    keys = max(model.layer_attention(layer).keys_at_position for layer in range(model.num_layers))
    heads = keys * model.num_heads
    return [
        {
            "tokens": tokens,
            "width": width,
            "operations": mixture_operations(tokens, heads, width, heads * width, keys)
            / softmax_operations(tokens, heads, width, heads * width),
            "parameters": mixture_parameters(heads, width, heads * width, keys)
            / softmax_parameters(heads, width, heads * width),
        }
        for tokens in TOKENS
        for width in WIDTHS
    ]
