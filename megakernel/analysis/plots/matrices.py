"""The attention matrix of a layer with any mechanism.

An output is a sum of values, o_i = sum_j w_ij v_j, and the weights do not depend on the values. So a layer that runs on
unit vectors as values returns its weights, D columns in a run for values of width D: with gates, landmark token counts,
landmarks and mixtures, and without another formula of the mechanism. `uptraining/sampled_queries.py` computes rows.

`attention`: images of the matrices (Transformer-MGK, figures 2, 6 and 9) of one sample, all layers and heads.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.attention import AttentionLayer
from megakernel.attention.low_rank import LowRankAttention
from megakernel.ops.tensors import accum_dtype

from .subject import CapturedAttention, Subject, evaluating
from .table import Row


@torch.no_grad()
def attention_matrix(captured: CapturedAttention) -> Tensor:
    """Weights (H, N, N) of queries on tokens, float32 or better; 0 where a query does not see the key.

    Weights on landmarks are mapped to their tokens by F. Costs N / D runs of the layer, in evaluation mode.
    """
    core, inputs = captured.core, captured.inputs
    dtype = accum_dtype(inputs.q.dtype)
    inputs = replace(inputs, q=inputs.q.to(dtype), k=inputs.k.to(dtype))
    batch, heads, count, width = inputs.v.shape
    columns = []
    with evaluating(core):
        for first in range(0, count, width):
            chunk = torch.arange(min(width, count - first), device=inputs.v.device)
            values = torch.zeros(batch, heads, count, width, dtype=dtype, device=inputs.v.device)
            values[:, :, first + chunk, chunk] = 1
            columns.append(inputs.run(core, values)[0, ..., : len(chunk)])
    weights = torch.cat(columns, -1)
    return weights @ _landmarks_of_tokens(core, inputs.q) if core.compresses_input else weights


@torch.no_grad()
def exact_matrix(captured: CapturedAttention) -> Tensor:
    """`attention_matrix` in float64, for singular values below the rounding error of float32.

    The layer's weights are float64 meanwhile, so the model must not have an optimizer that holds views of them.
    """
    core = captured.core
    dtypes = {tensor.dtype for tensor in core.state_dict().values() if tensor.is_floating_point()}
    assert dtypes <= {torch.float32}, "analyses load float32, which float64 holds exactly"
    inputs = replace(captured.inputs, q=captured.inputs.q.double(), k=captured.inputs.k.double())
    core.double()
    try:
        return attention_matrix(captured._replace(inputs=inputs))
    finally:
        core.float()


def _landmarks_of_tokens(core: AttentionLayer, q: Tensor) -> Tensor:
    """F (L, N): the weight of each token in the landmarks' values."""
    assert isinstance(core, LowRankAttention)
    length = q.shape[2]
    tokens = torch.eye(length, dtype=q.dtype, device=q.device)[:, None]
    return core.compress(tokens, first=0, length=length)[-1][:, 0].to(q.dtype)


CELLS = 64
"""Maximum cells of an image along each side; longer sequences have several tokens per cell."""


def measure_attention(subject: Subject) -> list[Row]:
    """The rows of `image_rows` for the first sample."""
    first = subject.captured(samples=1)
    return [row for _, layer, captured in first for row in image_rows(layer, attention_matrix(captured))]


def image_rows(layer: int, weights: Tensor) -> list[Row]:
    """Rows for weights (H, N, N): at most CELLS x CELLS cells per head; cells without weight are left out.

    query, key: the first token of a cell. weight: a query's total weight on the cell's keys, averaged over its queries.
    """
    size = -(-weights.shape[-1] // CELLS)
    pad = -weights.shape[-1] % size
    sums = F.pad(weights, (0, pad)).unflatten(-1, (-1, size)).sum(-1)
    starts = torch.arange(0, weights.shape[1], size, device=weights.device)
    means = torch.stack([sums[:, start : start + size].mean(1) for start in starts.tolist()], 1)
    return [
        {"layer": layer, "head": head, "query": size * query, "key": size * key, "weight": weight}
        for head, matrix in enumerate(means.tolist())
        for query, cells_of_query in enumerate(matrix)
        for key, weight in enumerate(cells_of_query)
        if weight
    ]
