"""A frozen teacher, and the loss of a model that learns from its probabilities and from the labels."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megakernel.config import Config
from megakernel.model import LanguageModel, Parted
from megakernel.model.layer_inputs import LayerInputs, as_bits, from_bits
from megakernel.model.settings import DTYPES
from megakernel.model.vocabulary_loss import DistillationTarget, LogitScaling
from megakernel.parallel import Mesh


@dataclass(eq=False)
class Teacher:
    """The frozen teacher of a student; no module, so neither optimizers nor checkpoints find it."""

    model: LanguageModel
    """From `frozen_model`; of a pipeline the layers of this stage."""

    _shares: bool = field(default=False, init=False)

    @torch.no_grad()
    def hidden(self, inputs: LayerInputs) -> Tensor:
        """States (N, B, C) before its head, of the tokens of inputs; of a stage, from what enters to what leaves."""
        return self.model.body(inputs)[0]

    @property
    def logit_scaling(self) -> LogitScaling:
        """Of its logits."""
        return LogitScaling.of(self.model.settings.model)

    @property
    def output_matrix(self) -> Tensor:
        """This tensor rank's rows (R / tp, C) of its head, padding included."""
        return self.model.output_matrix

    def share(self, student: nn.Module) -> None:
        """Use the student's tensor for every weight that it never updates and that is equal, from the first call on.

        Called before each training step: by the first of a start the student has its weights, new or continued.
        """
        if self._shares:
            return
        self._shares = True
        student_parameters = dict(student.named_parameters())
        for name, own in self.model.named_parameters():
            other = student_parameters.get(name)
            if other is None or other.requires_grad or other.dtype != own.dtype:
                continue
            if other.data_ptr() != own.data_ptr() and torch.equal(own, other):
                own.data = other.data


class Distillation:
    """The loss kl T^2 KL(teacher || model) + cross_entropy x the labels' cross entropy, and its parts' means."""

    def __init__(self, student: Parted, teacher: Teacher, config: Config, mesh: Mesh):
        """config: its objective says how much each part weighs."""
        self.student, self.teacher, self.mesh = student, teacher, mesh
        self.objective, self.dtype = config.objective, DTYPES[config.training.dtype]
        self._parts: Tensor | None = None

    def __call__(self, inputs: LayerInputs) -> LayerInputs | Tensor:
        """What a stage hands on: the model's states, and the teacher's as bits behind; of the last one the loss."""
        entering, teacher_hidden = inputs, None
        if self.objective.kl:
            if not self.mesh.is_first_stage:
                inputs, bits = inputs[:-1], inputs[-1]
                entering = (from_bits(bits, self.dtype), *inputs[1:])
            teacher_hidden = self.teacher.hidden(entering)
        leaving = self.student.body(inputs)
        if self.mesh.is_last_stage:
            return self._loss(leaving, teacher_hidden)
        return leaving if teacher_hidden is None else (*leaving, as_bits(teacher_hidden))

    def _loss(self, leaving: LayerInputs, teacher_hidden: Tensor | None) -> Tensor:
        """Of the inputs that enter both heads; without the teacher's states no divergence is wanted."""
        if teacher_hidden is None:
            return self.objective.cross_entropy * self.student.loss(leaving)
        weights = self.objective.temperature, self.objective.kl, self.objective.cross_entropy
        target = teacher_hidden, self.teacher.output_matrix
        distillation = DistillationTarget(*target, *weights, self.teacher.logit_scaling)
        loss = self.student.loss(leaving, distillation)
        assert distillation.parts is not None
        self._parts = distillation.parts if self._parts is None else self._parts + distillation.parts
        return loss

    def begin_step(self, step: int) -> None:
        """As of a `LanguageModel`."""
        self.teacher.share(self.student)

    def scalars(self) -> dict[str, float]:
        """Means per token since the last call, over all processes, in nats; called on all ranks."""
        own = None if self._parts is None else self._parts.double().cpu()
        self._parts = None
        found = [parts for parts in self.mesh.gather_objects(own) if parts is not None]
        if not found:
            return {}
        # Each tensor rank has the sums of the whole vocabulary, which leaves the means what they are.
        cross_entropy, divergence, tokens = torch.stack(found).sum(0).tolist()
        return {
            "train/cross_entropy": cross_entropy / max(tokens, 1),
            "train/divergence": divergence / max(tokens, 1),
        }
