"""Which transformer layers a pipeline stage holds, and how many parameters."""

from functools import cache
from itertools import pairwise

from megakernel.config import Attention, Model
from megakernel.model import parameters


def stage_layers(model: Model, stages: int) -> list[range]:
    """The layers of each stage: those that DeepSpeed's `type:TransformerLayer` gives it."""
    before = 2 if model.position in ("learned", "sinusoidal") else 1
    weights = (0,) * before + (1,) * model.num_layers + (0, 0)
    bounds = _balanced(weights, stages)
    inside = [min(max(bound - before, 0), model.num_layers) for bound in bounds]
    return [range(first, end) for first, end in pairwise(inside)]


@cache
def _balanced(weights: tuple[int, ...], parts: int) -> list[int]:
    """Bounds of `parts` consecutive groups whose sums differ least, the last best cut of equals.

    DeepSpeed's rule (`partition_balanced`): the smallest difference between the largest and the smallest sum.
    """
    if parts == 1:
        return [0, len(weights)]
    count = len(weights)
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    # best[i]: (difference, largest, smallest, bounds) of the first i items in as many groups as there were rounds.
    infinite = (float("inf"), float("inf"), float("inf"), ())
    best: list[tuple] = [(0, 0, float("inf"), (0,)), *[infinite] * count]
    for group in range(1, parts + 1):
        following: list[tuple] = [infinite] * (count + 1)
        for end in range(group, count + 1):
            for start in range(group - 1, end):
                _, largest, smallest, bounds = best[start]
                own = sums[end] - sums[start]
                largest, smallest = max(largest, own), min(smallest, own)
                if bounds and largest - smallest <= following[end][0]:
                    following[end] = (largest - smallest, largest, smallest, (*bounds, end))
        best = following
    return list(best[count][3])


def stage_parameters(model: Model, vocab_size: int, seq_len: int, tensor: int, stages: int) -> list[int]:
    """Trained numbers that one device of each stage holds."""
    rows = parameters.embedding_rows(model, vocab_size)
    known: dict[int, parameters.Parameters] = {}

    def counted(attention: Attention) -> parameters.Parameters:
        if id(attention) not in known:
            known[id(attention)] = parameters.layer_parameters(model, attention, seq_len)
        return known[id(attention)]

    held = []
    for stage, layers in enumerate(stage_layers(model, stages)):
        parts = [counted(model.layer_attention(index)) for index in layers]
        if stage == 0:
            parts += [parameters.embedding(model, rows), parameters.positions(model, seq_len)]
        if stage == stages - 1:
            parts += [parameters.norm(model), parameters.head(model, rows)]
            if stages > 1 and holds_second_embedding(model):
                parts.append(parameters.embedding(model, rows))
        held.append(sum(part.on_rank(tensor) for part in parts))
    return held


def holds_second_embedding(model: Model) -> bool:
    """Whether the last stage keeps a copy of the first one's matrix, as its head."""
    return model.tie_embeddings and model.classifier is None
