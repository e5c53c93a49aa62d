"""The distance that heads look back, and the share of it that is near.

`span`: the attention span of each layer, and what lies beyond its near window. `gates`: the share that gates give the
near window, of queries that have a far context (docs/formulas.md, 4).
"""

import torch
from torch import Tensor

from megakernel.attention.near_far import NearFarAttention
from megakernel.uptraining.head_statistics import far_keys, shares
from megakernel.uptraining.sampled_queries import SampledQueries

from .matrices import attention_matrix
from .subject import CapturedAttention, Subject
from .table import Row

DISTANCES = (16, 64, 256)
"""Tokens apart from which on weights are summed."""


def measure_span(subject: Subject) -> list[Row]:
    """layer, head, and means over the queries of all samples of what `reach` finds; empty where no query has it."""
    found: dict[int, list[Tensor]] = {}
    for _, layer, captured in subject.captured():
        core, inputs = captured.core, captured.inputs
        queries = SampledQueries.of(inputs, torch.arange(inputs.length, device=inputs.q.device), core.causal)
        found.setdefault(layer, []).append(reach(attention_matrix(captured), queries, core.near_window))
    table: list[Row] = []
    for layer, parts in found.items():
        sums = torch.stack(parts).sum(0)
        for head, (values, counts) in enumerate(zip(*(part.tolist() for part in sums))):
            row: Row = {"layer": layer, "head": head}
            for name, value, count in zip(NAMES, values, counts):
                row[name] = value / count if count else ""
            table.append(row)
    return table


NAMES = ("span", *(f"beyond_{distance}" for distance in DISTANCES), "far_mass")
"""Mean distance in tokens; shares of the weight on tokens at least so far apart, and beyond the near window."""


def reach(weights: Tensor, queries: SampledQueries, window: tuple[int, int] | None) -> Tensor:
    """Of the first sequence's weights (H, N, N): sums over queries and their number (2, H, names) of NAMES, float64.

    A share counts for queries that see a token so far apart. window: of a layer that attends the tokens near by
    exactly; without it no query has a far_mass. Weights below 0 count as 0.
    """
    seen = queries.visible[0]
    places = torch.arange(len(seen), device=seen.device)
    apart = (places[:, None] - places[None]).abs()
    of_keys = shares(weights.double() * seen)
    real = seen.any(-1)
    sums, counts = [(of_keys * apart).sum(-1)], [real]
    beyond = [apart >= distance for distance in DISTANCES]
    beyond.append(far_keys(queries, window)[0] if window is not None else torch.zeros_like(seen))
    for far in beyond:
        sums.append((of_keys * (far & seen)).sum(-1))
        counts.append((far & seen).any(-1))
    defined = torch.stack(counts, -1).expand(len(weights), -1, -1)
    values = torch.stack(sums, -1).masked_fill(~defined, 0.0)
    return torch.stack([values.sum(1), defined.double().sum(1)])


BINS = 20
"""Bins of a share between 0 and 1."""


def measure_gates(subject: Subject) -> list[Row]:
    """layer, head, near (where a bin begins), share (of the queries), gate (the head's mean, in all its sequences)."""
    found: dict[int, list[Tensor]] = {}
    for _, layer, captured in subject.captured():
        if (gates := near_shares(captured)) is not None:
            found.setdefault(layer, []).append(gates)
    return [row for layer, parts in found.items() for row in histogram(layer, torch.cat(parts, -1))]


@torch.no_grad()
def near_shares(captured: CapturedAttention) -> Tensor | None:
    """The gate of each query that sees a far context, (H, queries); None without a gate."""
    core, inputs = captured.core, captured.inputs
    if not isinstance(core, NearFarAttention):
        return None
    logits = core.gate(inputs.q)
    if logits is None:
        return None
    assert core.near_window is not None
    every = torch.arange(inputs.length, device=inputs.q.device)
    queries = SampledQueries.of(inputs, every, core.causal)
    looks_far = (far_keys(queries, core.near_window) & queries.visible).any(-1)[0]
    gates = torch.sigmoid(logits.double())
    return gates.expand(1, -1, inputs.length)[0][:, looks_far]


def histogram(layer: int, gates: Tensor) -> list[Row]:
    """Rows of (H, queries) gates; none where there is no query."""
    queries: list[Row] = []
    for head, of_head in enumerate(gates):
        if not len(of_head):
            continue
        counts = torch.histc(of_head, BINS, 0.0, 1.0)
        queries += [
            {
                "layer": layer,
                "head": head,
                "near": index / BINS,
                "share": count / len(of_head),
                "gate": of_head.mean().item(),
            }
            for index, count in enumerate(counts.tolist())
        ]
    return queries
