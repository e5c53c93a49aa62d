"""A model that learns from a frozen teacher's probabilities and from the labels."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megakernel.config import Config, Objective
from megakernel.model import LanguageModel, ModelSettings, Parted, Pipeline
from megakernel.model.layer_inputs import LayerInputs, as_bits, from_bits
from megakernel.model.settings import DTYPES
from megakernel.model.vocabulary_loss import DistillationTarget
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

    def __init__(self, teacher: Teacher, objective: Objective, mesh: Mesh):
        """objective: says how much each part weighs."""
        self.teacher, self.objective, self.mesh = teacher, objective, mesh
        self._parts: Tensor | None = None

    def hidden(self, inputs: LayerInputs) -> Tensor | None:
        """The teacher's states (N, B, C) as they leave this stage; None: no divergence is wanted."""
        return self.teacher.hidden(inputs) if self.objective.kl else None

    def loss(self, model: Parted, leaving: LayerInputs, teacher_hidden: Tensor | None) -> Tensor:
        """Of the inputs that enter both heads."""
        if teacher_hidden is None:
            return self.objective.cross_entropy * model.loss(leaving)
        weights = self.objective.temperature, self.objective.kl, self.objective.cross_entropy
        distillation = DistillationTarget(teacher_hidden, self.teacher.output_matrix, *weights)
        loss = model.loss(leaving, distillation)
        assert distillation.parts is not None
        self._parts = distillation.parts if self._parts is None else self._parts + distillation.parts
        return loss

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


class _Distilled:
    """What `DistilledModel` and `DistilledPipeline` are told and tell alike."""

    distillation: Distillation

    def begin_step(self, step: int) -> None:
        """As of a `LanguageModel`."""
        assert isinstance(self, nn.Module)
        self.distillation.teacher.share(self)

    def scalars(self) -> dict[str, float]:
        """See `Distillation`."""
        return self.distillation.scalars()


class DistilledModel(_Distilled, LanguageModel):
    """In training its loss is that of a `Distillation`; outside training it is the model alone.

    The teacher is no part of the module: neither the optimizer nor a checkpoint knows it.
    """

    def __init__(self, settings: ModelSettings, config: Config, teacher: Teacher):
        """config: see `Distillation`."""
        super().__init__(settings)
        assert isinstance(settings.mesh, Mesh)
        self.distillation = Distillation(teacher, config.objective, settings.mesh)

    def forward(self, *inputs: Tensor) -> Tensor:
        """As a LanguageModel, but for the loss."""
        if not self.training:
            return super().forward(*inputs)
        teacher_hidden = self.distillation.hidden(inputs)
        return self.distillation.loss(self, self.body(inputs), teacher_hidden)


class DistilledPipeline(_Distilled, Pipeline):
    """The same for a stage. In training the teacher's states go from stage to stage with the model's, as bits."""

    def __init__(
        self, settings: ModelSettings, loss_scale: Callable[[], float], config: Config, teacher: Teacher
    ):
        """loss_scale: see `Pipeline`. config: see `Distillation`. teacher: has this stage's layers."""
        super().__init__(settings, loss_scale)
        self.dtype = DTYPES[config.training.dtype]
        self.distillation = Distillation(teacher, config.objective, self.mesh)

    def forward(self, inputs: LayerInputs) -> LayerInputs | Tensor:
        """What the stage hands on; of the last one the loss."""
        if not self.training:
            return super().forward(inputs)
        entering = inputs
        if self.distillation.objective.kl and not self.mesh.is_first_stage:
            inputs, bits = inputs[:-1], inputs[-1]
            entering = (from_bits(bits, self.dtype), *inputs[1:])
        teacher_hidden = self.distillation.hidden(entering)
        leaving = self.body(inputs)
        if self.mesh.is_last_stage:
            return self.distillation.loss(self, leaving, teacher_hidden)
        return leaving if teacher_hidden is None else (*leaving, as_bits(teacher_hidden))
