"""Plots of a model in training, cheap enough for every few thousand steps."""

import torch
from matplotlib.figure import Figure

from megakernel.model import LanguageModel
from megakernel.model.layer_inputs import LayerInputs

from .catalogue import ANALYSES
from .drawing import figures
from .matrices import attention_matrix, image
from .spectra import decay, eigenvalue_rows, relative_singular_values
from .subject import captured_attention, first_row
from .table import Row


@torch.no_grad()
def attention_figures(
    model: LanguageModel, inputs: LayerInputs, *, length: int = 128, heads: int = 4, draw: bool = True
) -> dict[str, Figure]:
    """Attention matrices of each layer and how fast their singular values fall, by TensorBoard tag.

    Tags: `analysis/attention/layer_L`, `analysis/singular_values/...` and, of learned covariances,
    `analysis/covariances/eigenvalues`. Costs one forward pass of `length` tokens and length / head_dim runs of each
    layer's attention. Mode, noise and random state stay as they were. Not for a pipeline's stages.

    Args:
        model: on all ranks that share its layers' weights, each of which calls this. A rank sees the heads of its own.
        inputs: what the first layer reads; the first sequence's first `length` real tokens are taken, whole also where
            ranks share sequences.
        heads: of each layer, at most.
        draw: False does the same work and draws nothing, for ranks whose plots nobody writes.
    """
    images: list[Row] = []
    values: list[Row] = []
    for layer, captured in captured_attention(model, first_row(inputs, length)).items():
        weights = attention_matrix(captured)[:heads]
        if not draw:
            continue
        images += image(layer, weights)
        for name, matrix in (("weights", weights), ("output", captured.output[0, :heads])):
            relative = relative_singular_values(matrix)
            values += decay(layer, name, relative)
    eigenvalues = eigenvalue_rows(model) if draw else []
    tables = {"attention": images, "singular_values": values, "covariances": eigenvalues}
    return {
        f"analysis/{name}/{plot}": figure
        for name, rows in tables.items()
        for plot, figure in figures(rows, ANALYSES[name].plots).items()
    }
