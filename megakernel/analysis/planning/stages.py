"""Which transformer layers a pipeline stage holds, and how many parameters."""

from functools import cache
from itertools import pairwise

from megakernel.config import Model


def stage_layers(model: Model, stages: int) -> list[range]:
    """The layers of each stage: those that DeepSpeed's `type:TransformerLayer` gives it."""
    before = 2 if model.position in ("learned", "sinusoidal") else 1
    return _cut(before, model.num_layers, stages)


@cache
def _cut(before: int, layers: int, stages: int) -> list[range]:
    from megakernel.parallel import prepare_device

    prepare_device("cpu", 0)  # DeepSpeed, not told of its device, prints to stdout what it takes
    from deepspeed.runtime.utils import partition_balanced

    weights = [0] * before + [1] * layers + [0, 0]
    bounds = [0, len(weights)] if stages == 1 else partition_balanced(weights, stages)
    inside = [min(max(int(bound) - before, 0), layers) for bound in bounds]
    return [range(first, end) for first, end in pairwise(inside)]


def holds_second_embedding(model: Model) -> bool:
    """Whether the last stage keeps a copy of the first one's matrix, as its head."""
    return model.tie_embeddings and model.classifier is None
