"""Plots of a model in training, cheap enough for every few thousand steps."""

import torch
from matplotlib.figure import Figure

from megakernel.attention.selected import FlurkaSelectedAttention, SelectedAttention
from megakernel.model import LanguageModel
from megakernel.model.layer import attention_cores
from megakernel.model.layer_inputs import LayerInputs

from .catalogue import ANALYSES
from .choices import COLUMNS, choice_sums
from .drawing import figures
from .matrices import attention_matrix, image_rows
from .reach import mean_rows
from .spectra import eigenvalue_rows, relative_singular_values, singular_value_rows
from .subject import captured_attention, first_sequence
from .table import Row


@torch.no_grad()
def attention_figures(
    model: LanguageModel, inputs: LayerInputs, *, length: int = 128, heads: int = 4, draw: bool = True
) -> dict[str, Figure]:
    """Plots of each layer's attention matrices and singular values, by TensorBoard tag.

    Tags: `plots/attention/layer_L`, `plots/singular_values/...`, of learned covariances
    `plots/covariances/eigenvalues`, and of chosen blocks `plots/choices/...`. Costs one forward pass of `length` tokens
    and length / head_dim runs of each layer's attention; chosen blocks a further pass of _BLOCKS blocks. Mode, noise
    and random state are restored. Layers whose numbers are not finite are left out. Pipeline stages are not supported.

    Args:
        model: all ranks that share its layers' weights must call this; each plots its own heads.
        inputs: inputs of the first layer; only the first `length` real tokens of the first sequence are used. A
            context rank treats its shard as a whole sequence.
        heads: maximum number per layer.
        draw: False: do the same computation without plotting, on ranks whose plots are not written.
    """
    images: list[Row] = []
    values: list[Row] = []
    for layer, captured in captured_attention(model, first_sequence(inputs, length)).items():
        weights = attention_matrix(captured)[:heads]
        if not draw or not captured.is_finite:
            continue
        images += image_rows(layer, weights)
        for name, matrix in (("weights", weights), ("output", captured.output[0, :heads])):
            relative = relative_singular_values(matrix)
            values += singular_value_rows(layer, name, relative)
    eigenvalues = eigenvalue_rows(model) if draw else []
    choices = _choice_rows(model, inputs, draw)
    tables = {
        "attention": images,
        "singular_values": values,
        "covariances": eigenvalues,
        "choices": choices,
    }
    return {
        f"plots/{name}/{plot}": figure
        for name, rows in tables.items()
        for plot, figure in figures(rows, ANALYSES[name].plots).items()
    }


_BLOCKS = 16
"""Blocks of the tokens in which choices are measured; the weights that softmax would have are a matrix of them."""


def _choice_rows(model: LanguageModel, inputs: LayerInputs, draw: bool) -> list[Row]:
    """The rows of the analysis `choices` for the beginning of the first sequence; none without chosen blocks."""
    sizes = [
        core.near_window[0]
        for core in attention_cores(model).values()
        if isinstance(core, SelectedAttention | FlurkaSelectedAttention) and core.near_window is not None
    ]
    if not sizes:
        return []
    captured = captured_attention(model, first_sequence(inputs, _BLOCKS * max(sizes)))
    sums = {
        layer: [found]
        for layer, one in captured.items()
        if draw and one.is_finite and (found := choice_sums(one)) is not None
    }
    # A sequence of a few blocks may have no query that sees one before its window.
    return [row for row in mean_rows(sums, COLUMNS) if "" not in row.values()]
