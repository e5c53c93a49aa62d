"""Plots of a model in training, cheap enough for every few thousand steps."""

import torch
from matplotlib.figure import Figure

from megakernel.model import LanguageModel
from megakernel.model.layer_inputs import LayerInputs

from .catalogue import ANALYSES
from .drawing import figures
from .matrices import attention_matrix, image_rows
from .spectra import eigenvalue_rows, relative_singular_values, singular_value_rows
from .subject import captured_attention, first_sequence
from .table import Row


@torch.no_grad()
def attention_figures(
    model: LanguageModel, inputs: LayerInputs, *, length: int = 128, heads: int = 4, draw: bool = True
) -> dict[str, Figure]:
    """Plots of each layer's attention matrices and singular values, by TensorBoard tag.

    Tags: `plots/attention/layer_L`, `plots/singular_values/...` and, of learned covariances,
    `plots/covariances/eigenvalues`. Costs one forward pass of `length` tokens and length / head_dim runs of each
    layer's attention. Mode, noise and random state are restored. Layers whose numbers are not finite are left out.
    Pipeline stages are not supported.

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
    tables = {"attention": images, "singular_values": values, "covariances": eigenvalues}
    return {
        f"plots/{name}/{plot}": figure
        for name, rows in tables.items()
        for plot, figure in figures(rows, ANALYSES[name].plots).items()
    }
