"""The model that lowers what the objective section names."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from data_pipeline.corpus import Corpora
from megakernel.checkpoint.frozen import frozen_model
from megakernel.checkpoint.weight_source import WeightSource
from megakernel.config import Config, UserError
from megakernel.model import LanguageModel, ModelSettings, Parted, Pipeline, build_model
from megakernel.model.layer_inputs import LayerInputs
from megakernel.model.settings import DTYPES
from megakernel.parallel import Mesh
from megakernel.parallel.ranks import Ranks

from .distilled import Distillation, Teacher
from .transferred import LayerTransfer


def model_maker(
    config: Config, corpora: Corpora, ranks: Ranks
) -> Callable[[ModelSettings, Callable[[], float]], Parted]:
    """What makes the model of a process, or its stage of one, as `build_model` does.

    Raises UserError, alike on all ranks, for a teacher that is not there or has another tokenizer than the data.
    """
    folder = config.objective.teacher
    if folder is None:
        return build_model
    source = WeightSource.find("objective.teacher", folder, ranks)
    ranks.first(lambda: source.check_tokenizer(corpora))
    return partial(_with_teacher, config, source)


def _with_teacher(
    config: Config, source: WeightSource, settings: ModelSettings, loss_scale: Callable[[], float]
) -> Parted:
    assert isinstance(settings.mesh, Mesh)
    wanted, tensor, stages = source.model(), settings.mesh.tp.size, settings.mesh.pp.size
    if wanted.kv_heads % tensor or wanted.num_layers < stages:
        raise UserError(
            f"{source.key}={source.folder} has {wanted.num_layers} layers of {wanted.kv_heads} key heads, which "
            f"parallel.pipeline={stages} and parallel.tensor={tensor} do not share; set sizes that divide its own"
        )
    teacher = Teacher(frozen_model(settings, wanted, source, DTYPES[config.training.dtype]))
    model = TaughtPipeline(settings, loss_scale) if settings.mesh.pp.size > 1 else TaughtModel(settings)
    objective = LayerTransfer if config.objective.kind == "transfer" else Distillation
    model.objective = objective(model, teacher, config, settings.mesh)
    return model


class _Taught:
    """What both models below are told and tell alike."""

    objective: Distillation | LayerTransfer
    """What is lowered in training. No part of the module: neither the optimizer nor a checkpoint knows its teacher."""

    def begin_step(self, step: int) -> None:
        """As of a `LanguageModel`."""
        self.objective.begin_step(step)

    def scalars(self) -> dict[str, float]:
        """As of a `LanguageModel`."""
        return self.objective.scalars()


class TaughtModel(_Taught, LanguageModel):
    """In training its loss is that of its objective; outside training it is the model alone."""

    def forward(self, *inputs: Tensor) -> Any:
        """As a LanguageModel, but for the loss."""
        return self.objective(inputs) if self.training else super().forward(*inputs)


class TaughtPipeline(_Taught, Pipeline):
    """The same for a stage; the teacher has this stage's layers."""

    def forward(self, inputs: LayerInputs) -> Any:
        """What the stage hands on; of the last one the loss."""
        return self.objective(inputs) if self.training else super().forward(inputs)
