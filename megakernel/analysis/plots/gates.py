"""The share that gates give the near window, of queries that have a far context (docs/formulas.md, 4)."""

import torch
from torch import Tensor

from megakernel.attention.near_far import NearFarAttention
from megakernel.uptraining.head_statistics import far_keys
from megakernel.uptraining.query_rows import QueryRows

from .subject import CapturedAttention, Subject
from .table import Row

BINS = 20
"""Bins of a share between 0 and 1."""


def measure(subject: Subject) -> list[Row]:
    """layer, head, near (where a bin begins), share (of the queries), gate (the head's mean, in all its rows)."""
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
    rows = QueryRows.of(inputs, every, core.causal)
    looks_far = (far_keys(rows, core.near_window) & rows.visible).any(-1)[0]
    gates = torch.sigmoid(logits.double())
    return gates.expand(1, -1, inputs.length)[0][:, looks_far]


def histogram(layer: int, gates: Tensor) -> list[Row]:
    """Rows of (H, queries) gates; none where there is no query."""
    rows: list[Row] = []
    for head, of_head in enumerate(gates):
        if not len(of_head):
            continue
        counts = torch.histc(of_head, BINS, 0.0, 1.0)
        rows += [
            {
                "layer": layer,
                "head": head,
                "near": index / BINS,
                "share": count / len(of_head),
                "gate": of_head.mean().item(),
            }
            for index, count in enumerate(counts.tolist())
        ]
    return rows
