"""Costs of mixture keys at the run's heads and keys, relative to softmax.

`mixture_costs`: operations and parameters of attention with mixture keys over those of softmax with M times the heads
(Transformer-MGK, figure 3), over widths and lengths. The input is as wide as all heads of softmax together. The paper
counts every multiplication and addition of an attention layer, n (2 k - 1) for n products of k numbers, over all N^2
pairs and without the softmax; D is the width of a head, D_x that of the input.
"""

from megakernel.analysis.plots.subject import Subject
from megakernel.analysis.plots.table import Row


def softmax_operations(length: int, heads: int, width: int, input_width: int) -> int:
    """(i): N^2 H (4 D - 1) + N H D (6 D_x + 2 H D - 5)."""
    per_token = heads * width * (6 * input_width + 2 * heads * width - 5)
    return length**2 * heads * (4 * width - 1) + length * per_token


def mixture_operations(length: int, heads: int, width: int, input_width: int, keys: int = 2) -> int:
    """(ii) for any M: (H / M) (N^2 ((2 M + 2) D - 1) + N D ((M + 2)(2 D_x - 1) - 1)) + N H D (2 (H / M) D - 1).

    The next line of the paper, which adds this up, prints N H D (M - 1) / M too little.
    """
    each = heads // keys
    pairs = length**2 * ((2 * keys + 2) * width - 1)
    projections = length * width * ((keys + 2) * (2 * input_width - 1) - 1)
    return each * (pairs + projections) + length * heads * width * (2 * each * width - 1)


def softmax_parameters(heads: int, width: int, input_width: int) -> int:
    """(iii): 3 H D D_x + (H D)^2."""
    return 3 * heads * width * input_width + (heads * width) ** 2


def mixture_parameters(heads: int, width: int, input_width: int, keys: int = 2) -> int:
    """(iv) for any M: queries, M keys and values of H / M heads, their output, and M priors for each of them."""
    each = heads // keys
    return each * (keys + 2) * width * input_width + each * width * heads * width + heads


WIDTHS = tuple(2**n for n in range(4, 10))
MIXTURE_TOKENS = tuple(2**n for n in range(8, 15))


def measure_mixture_costs(subject: Subject) -> list[Row]:
    """tokens N, width D of a head, operations and parameters: of H heads with M keys over M H heads of softmax."""
    model = subject.config.model
    keys = max(layer.keys_at_position for layer in model.attentions)
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
        for tokens in MIXTURE_TOKENS
        for width in WIDTHS
    ]
