"""What a layer's chosen blocks hold (docs/formulas.md, 11), against softmax over all tokens with the same q and k.

`choices`, over the queries that see a block before their window: how much of the softmax's weight lies there, and how
much of that is in chosen blocks, which is what landmarks are for; how far away the chosen tokens are; and how often a
query chooses as the one before it.
"""

import torch
from torch import Tensor

from megakernel.attention.selected import FlurkaSelectedAttention, SelectedAttention
from megakernel.uptraining.head_statistics import far_keys
from megakernel.uptraining.sampled_queries import SampledQueries

from .reach import mean_rows
from .subject import CapturedAttention, Subject
from .table import Row

COLUMNS = ("far", "found", "distance", "repeated")
"""Softmax's weight before the window; the share of it in chosen blocks; their mean distance in tokens; the share of
chosen tokens that the query before has chosen, too."""


def measure_choices(subject: Subject) -> list[Row]:
    """layer, head, and the means of COLUMNS over all samples; layers without chosen blocks have no rows."""
    by_layer: dict[int, list[Tensor]] = {}
    for _, layer, captured in subject.captured():
        if (sums := choice_sums(captured)) is not None:
            by_layer.setdefault(layer, []).append(sums)
    return mean_rows(by_layer, COLUMNS)


@torch.no_grad()
def choice_sums(captured: CapturedAttention) -> Tensor | None:
    """Sums of COLUMNS over a sequence's queries, and what to divide them by: (2, H, columns) float64."""
    core, inputs = captured.core, captured.inputs
    if not isinstance(core, SelectedAttention | FlurkaSelectedAttention):
        return None
    assert core.near_window is not None
    chosen = core.selector.chosen_tokens(inputs.q, inputs.k, core.landmark_pool(inputs.k), inputs)
    chosen = chosen.repeat_interleave(inputs.group, 1)[0]
    every = torch.arange(inputs.length, device=inputs.q.device)
    queries = SampledQueries.of(inputs, every, core.causal)
    seen = queries.visible[0]
    far = (far_keys(queries, core.near_window) & queries.visible)[0]
    q, k = (x.double() for x in inputs.rotated(inputs.q, inputs.k))
    scores = q[0] @ k[0].repeat_interleave(inputs.group, 0).mT * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    distances = (every[:, None] - every).double()
    of_far, of_chosen = (weights * far).sum(-1), (weights * chosen).sum(-1)
    has_far, size = far.any(-1).expand_as(of_far), chosen.sum(-1)
    before = chosen.roll(1, 1) & chosen
    before[:, 0] = False
    values = (of_far, of_chosen, (chosen * distances).sum(-1), before.sum(-1))
    # `found` is a share of the weight far away, so that queries which look there count.
    counts = (has_far, of_far, size, size)
    return torch.stack(
        [
            torch.stack([x.masked_fill(~has_far, 0).double().sum(-1) for x in part], -1)
            for part in (values, counts)
        ]
    )
