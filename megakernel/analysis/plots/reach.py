"""How far heads look back, and how gates weigh near and far.

`span`: the attention span of each layer, and the weight beyond its near window. `gates`: the weight that gates give the
near window, for queries that have a far context (docs/formulas.md, 4).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megakernel.attention.near_far import NearFarAttention
from megakernel.uptraining.head_statistics import far_keys, normalized_weights
from megakernel.uptraining.sampled_queries import SampledQueries

from .matrices import attention_matrix
from .subject import CapturedAttention, Subject
from .table import Row

DISTANCES = (16, 64, 256)
"""Distances in tokens; weights on tokens at least this far apart are summed."""


def measure_span(subject: Subject) -> list[Row]:
    """layer, head, and the means of COLUMNS over the queries of all samples; empty if defined for no query."""
    by_layer: dict[int, list[Tensor]] = {}
    for _, layer, captured in subject.captured():
        core, inputs = captured.core, captured.inputs
        queries = SampledQueries.of(inputs, torch.arange(inputs.length, device=inputs.q.device), core.causal)
        sums = span_sums(attention_matrix(captured), queries, core.near_window)
        by_layer.setdefault(layer, []).append(sums)
    return mean_rows(by_layer, COLUMNS)


def mean_rows(by_layer: Mapping[int, Sequence[Tensor]], columns: Sequence[str]) -> list[Row]:
    """layer, head, and the means of the columns; empty where nothing was counted.

    by_layer: for every sample, sums and counts (2, H, columns).
    """
    table: list[Row] = []
    for layer, parts in by_layer.items():
        sums = torch.stack(list(parts)).sum(0)
        for head, (values, counts) in enumerate(zip(*(part.tolist() for part in sums))):
            row: Row = {"layer": layer, "head": head}
            for name, value, count in zip(columns, values, counts):
                row[name] = value / count if count else ""
            table.append(row)
    return table


COLUMNS = ("span", *(f"beyond_{distance}" for distance in DISTANCES), "far_mass")
"""Mean distance in tokens; shares of the weight on tokens at least this far apart, and beyond the near window."""


def span_sums(weights: Tensor, queries: SampledQueries, window: tuple[int, int] | None) -> Tensor:
    """Sums of COLUMNS over queries, and numbers of queries, for weights (H, N, N): (2, H, columns) float64.

    A share is defined for queries that see a token that far apart. window: the layer's near window; without it
    far_mass is undefined. Weights below 0 count as 0.
    """
    seen = queries.visible[0]
    positions = torch.arange(len(seen), device=seen.device)
    distances = (positions[:, None] - positions[None]).abs()
    of_keys = normalized_weights(weights.double() * seen)
    has_keys = seen.any(-1)
    sums, counts = [(of_keys * distances).sum(-1)], [has_keys]
    beyond = [distances >= distance for distance in DISTANCES]
    beyond.append(far_keys(queries, window)[0] if window is not None else torch.zeros_like(seen))
    for far in beyond:
        sums.append((of_keys * (far & seen)).sum(-1))
        counts.append((far & seen).any(-1))
    defined = torch.stack(counts, -1).expand(len(weights), -1, -1)
    values = torch.stack(sums, -1).masked_fill(~defined, 0.0)
    return torch.stack([values.sum(1), defined.double().sum(1)])


BINS = 20
"""Bins of a histogram from 0 to 1."""


def measure_gates(subject: Subject) -> list[Row]:
    """layer, head, near (start of a bin), share (of the queries in it), gate (the head's mean over all sequences)."""
    by_layer: dict[int, list[Tensor]] = {}
    for _, layer, captured in subject.captured():
        if (gates := near_shares(captured)) is not None:
            by_layer.setdefault(layer, []).append(gates)
    return [row for layer, parts in by_layer.items() for row in histogram(layer, torch.cat(parts, -1))]


@torch.no_grad()
def near_shares(captured: CapturedAttention) -> Tensor | None:
    """Gates of the queries that see a far context, (H, queries); None if the layer has no gate."""
    core, inputs = captured.core, captured.inputs
    if not isinstance(core, NearFarAttention):
        return None
    logits = core.gate(inputs.q)
    if logits is None:
        return None
    assert core.near_window is not None
    every = torch.arange(inputs.length, device=inputs.q.device)
    queries = SampledQueries.of(inputs, every, core.causal)
    has_far = (far_keys(queries, core.near_window) & queries.visible).any(-1)[0]
    gates = torch.sigmoid(logits.double())
    return gates.expand(1, -1, inputs.length)[0][:, has_far]


def histogram(layer: int, gates: Tensor) -> list[Row]:
    """Rows for gates (H, queries); none without queries."""
    rows: list[Row] = []
    for head, of_head in enumerate(gates):
        if not len(of_head):
            continue
        shares, mean = torch.histc(of_head, BINS, 0.0, 1.0) / len(of_head), of_head.mean().item()
        rows += [
            {"layer": layer, "head": head, "near": index / BINS, "share": share, "gate": mean}
            for index, share in enumerate(shares.tolist())
        ]
    return rows
