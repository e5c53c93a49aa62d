"""A model that learns from a teacher's probabilities beside the labels."""

from torch import Tensor

from megakernel.config import Config
from megakernel.model import LanguageModel, ModelSettings
from megakernel.model.distillation import mean_divergence
from megakernel.model.head import mean_loss

from .teacher import Teacher


class DistilledModel(LanguageModel):
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
        weights = self.objective
        hidden, *rest = self.body(stream)
        _, labels, num_targets = rest
        loss = hidden.new_zeros((), dtype=hidden.dtype).float()
        if weights.cross_entropy:
            loss = loss + weights.cross_entropy * mean_loss(
                self.output_matrix, (hidden, *rest), self.settings
            )
        if weights.kl:
            theirs = self.teacher.hidden(stream)
            matrices = self.output_matrix, self.teacher.output_matrix
            divergence = mean_divergence(
                matrices, (hidden, theirs), labels, num_targets, weights.temperature, self.settings
            )
            loss = loss + weights.kl * divergence
        return loss
