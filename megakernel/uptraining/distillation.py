"""A frozen teacher, and the distillation loss of a student."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megakernel.config import Config
from megakernel.model import LanguageModel, LocalModel
from megakernel.model.layer_inputs import LayerInputs, as_bytes
from megakernel.model.settings import DTYPES
from megakernel.model.vocabulary_loss import DistillationTarget, LogitScaling
from megakernel.parallel import Mesh


@dataclass(eq=False)
class Teacher:
    """The frozen teacher of a student; not a module, so that neither optimizers nor checkpoints include it."""

    model: LanguageModel
    """From `frozen_model`; with a pipeline the layers of this stage."""

    _weights_are_shared: bool = field(default=False, init=False)

    @torch.no_grad()
    def hidden(self, inputs: LayerInputs) -> Tensor:
        """Hidden states (N, B, C) before its head; with a pipeline, the output of this stage from its `inputs`."""
        return self.model.body(inputs)[0]

    def share_weights(self, student: nn.Module) -> None:
        """Share the storage of every weight that is frozen in the student and equal in both, from the first call on.

        Called before each training step, because the student has loaded its weights only by the first step.
        """
        if self._weights_are_shared:
            return
        self._weights_are_shared = True
        student_parameters = dict(student.named_parameters())
        for name, weight in self.model.named_parameters():
            shared = student_parameters.get(name)
            if shared is None or shared.requires_grad or shared.dtype != weight.dtype:
                continue
            if shared.data_ptr() != weight.data_ptr() and torch.equal(weight, shared):
                weight.data = shared.data


class Distillation:
    """The loss kl T^2 KL(teacher || student) + cross_entropy x the labels' cross entropy, and its parts' means."""

    def __init__(self, student: LocalModel, teacher: Teacher, config: Config, mesh: Mesh):
        """config: its objective section has the weights of the parts."""
        self.student, self.teacher, self.mesh = student, teacher, mesh
        self.objective, self.dtype = config.objective, DTYPES[config.training.dtype]
        self._parts: Tensor | None = None

    def __call__(self, inputs: LayerInputs) -> LayerInputs | Tensor:
        """The outputs of a stage: the student's, then the teacher's states as bytes; of the last stage the loss."""
        entering = inputs
        if not self.mesh.is_first_stage:
            inputs, data = inputs[:-1], inputs[-1]
            entering = (data.view(self.dtype), *inputs[1:])
        teacher_hidden = self.teacher.hidden(entering)
        leaving = self.student.body(inputs)
        return (
            self._loss(leaving, teacher_hidden)
            if self.mesh.is_last_stage
            else (*leaving, as_bytes(teacher_hidden))
        )

    def _loss(self, leaving: LayerInputs, teacher_hidden: Tensor) -> Tensor:
        """Loss from the inputs of both heads."""
        weights = self.objective.temperature, self.objective.kl, self.objective.cross_entropy
        teacher = self.teacher.model
        scaling = LogitScaling.of(teacher.settings.model)
        distillation = DistillationTarget(teacher_hidden, teacher.output_matrix, *weights, scaling)
        loss = self.student.loss(leaving, distillation)
        assert distillation.parts is not None
        self._parts = distillation.parts if self._parts is None else self._parts + distillation.parts
        return loss

    def begin_step(self, step: int) -> None:
        """Do what `LanguageModel.begin_step` does."""
        self.teacher.share_weights(self.student)

    def scalars(self) -> dict[str, float]:
        """Means in nats per token since the last call, over all processes; called on all ranks."""
        local = None if self._parts is None else self._parts.double().cpu()
        self._parts = None
        gathered = [parts for parts in self.mesh.gather_objects(local) if parts is not None]
        if not gathered:
            return {}
        # Every tensor rank has the same sums and token counts, so adding them up leaves the means unchanged.
        cross_entropy, divergence, tokens = torch.stack(gathered).sum(0).tolist()
        if not tokens:
            return {}
        return {"train/cross_entropy": cross_entropy / tokens, "train/divergence": divergence / tokens}
