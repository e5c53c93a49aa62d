"""The loss of a model that learns from a teacher's predictions beside the labels."""

from torch import Tensor

from megakernel.config import Objective

from .head import for_vocabulary
from .settings import ModelSettings
from .stream import IGNORED, Stream
from .vocabulary_loss import Lesson, summed_loss


def mean_distillation(
    matrices: tuple[Tensor, Tensor],
    stream: Stream,
    theirs: Tensor,
    objective: Objective,
    settings: ModelSettings,
) -> Tensor:
    """kl T^2 KL(teacher || model) + cross_entropy x the labels' cross entropy, in nats, at the objective's T.

    This piece's sum over its targets, divided by their number in the global batch, see `head.mean_loss`.

    matrices: (V / tp, C) of the model and of its teacher, whose widths may differ; stream: with the model's states
    (N, B, C) before the head; theirs: the teacher's, which get no gradient.
    """
    hidden, _, labels, num_targets = stream
    ours, theirs = (for_vocabulary(states, settings).flatten(0, 1) for states in (hidden, theirs))
    targets = labels.transpose(0, 1).reshape(-1)
    counts = targets != IGNORED  # what does not count needs no logits of two models
    lesson = Lesson(theirs[counts], matrices[1], objective.temperature, objective.kl, objective.cross_entropy)
    tp = settings.mesh.tp
    group = tp.group if tp.size > 1 else None
    summed = summed_loss(ours[counts], matrices[0], targets[counts], settings.loss_chunk_size, group, lesson)
    return summed / num_targets.squeeze()
