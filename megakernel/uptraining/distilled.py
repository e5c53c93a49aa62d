"""A model that learns from a teacher's probabilities beside the labels."""

from collections.abc import Callable

from torch import Tensor, nn

from megakernel.config import Config, Objective
from megakernel.model import LanguageModel, ModelSettings, Parted, Pipeline
from megakernel.model.distillation import mean_distillation
from megakernel.model.head import mean_loss
from megakernel.model.stream import Stream, as_bits, from_bits
from megakernel.training.dtypes import DTYPES

from .teacher import Teacher


class _Distilled:
    """What `DistilledModel` and `DistilledPipeline` are told alike."""

    teacher: Teacher

    def begin_step(self, step: int) -> None:
        """As of a `LanguageModel`."""
        assert isinstance(self, nn.Module)
        self.teacher.share(self)


class DistilledModel(_Distilled, LanguageModel):
    """In training its loss is kl T^2 KL(teacher || model) + cross_entropy x the labels' cross entropy.

    Outside training it is the model alone. The teacher is no part of the module: neither the optimizer nor a
    checkpoint knows it.
    """

    def __init__(self, settings: ModelSettings, config: Config, teacher: Teacher):
        """config: its objective says how much each part weighs."""
        super().__init__(settings)
        self.objective = config.objective
        self.teacher = teacher

    def forward(self, *stream: Tensor) -> Tensor:
        """As a LanguageModel, but for the loss."""
        if not self.training:
            return super().forward(*stream)
        theirs = self.teacher.hidden(stream) if self.objective.kl else None
        return _loss(self, self.teacher, self.objective, self.body(stream), theirs)


class DistilledPipeline(_Distilled, Pipeline):
    """The same for a stage. In training the teacher's states go from stage to stage beside the model's, as bits."""

    def __init__(
        self, settings: ModelSettings, loss_scale: Callable[[], float], config: Config, teacher: Teacher
    ):
        """loss_scale: see `Pipeline`. config: see `DistilledModel`. teacher: has this stage's layers."""
        super().__init__(settings, loss_scale)
        self.objective = config.objective
        self.dtype = DTYPES[config.training.dtype]
        self.teacher = teacher

    def forward(self, stream: Stream) -> Stream | Tensor:
        """What the stage hands on; of the last one the loss."""
        if not self.training:
            return super().forward(stream)
        theirs = None
        if self.objective.kl:
            entering = stream[0]
            if not self.mesh.is_first_stage:
                entering, stream = from_bits(stream[-1], self.dtype), stream[:-1]
            theirs = self.teacher.hidden((entering, *stream[1:]))
        leaving = self.body(stream)
        if self.mesh.is_last_stage:
            return _loss(self, self.teacher, self.objective, leaving, theirs)
        return leaving if theirs is None else (*leaving, as_bits(theirs))


def _loss(
    model: Parted, teacher: Teacher, objective: Objective, stream: Stream, theirs: Tensor | None
) -> Tensor:
    """Of the model's stream and the teacher's states (N, B, C) before their heads; None: no divergence is wanted."""
    if theirs is None:
        return objective.cross_entropy * mean_loss(model.output_matrix, stream, model.settings)
    matrices = model.output_matrix, teacher.output_matrix
    return mean_distillation(matrices, stream, theirs, objective, model.settings)
