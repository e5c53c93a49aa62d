"""Models that are trained on the objective section's loss."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from data_pipeline.corpus import Corpora
from megakernel.checkpoint.frozen import frozen_model
from megakernel.checkpoint.weight_source import WeightSource
from megakernel.config import Config, UserError
from megakernel.config.rules import heads_over_tensor_ranks
from megakernel.model import LanguageModel, LocalModel, ModelSettings, Pipeline, build_model
from megakernel.model.layer_inputs import LayerInputs
from megakernel.model.settings import DTYPES
from megakernel.parallel import Mesh
from megakernel.parallel.ranks import Ranks

from .distillation import Distillation, Teacher
from .layer_transfer import LayerTransfer


def model_maker(
    config: Config, corpora: Corpora, ranks: Ranks
) -> Callable[[ModelSettings, Callable[[], float]], LocalModel]:
    """Return the function that builds a process's model or pipeline stage, with the interface of `build_model`.

    Raises UserError, alike on all ranks, if the teacher is missing, has another tokenizer than the data or no weight in
    the loss.
    """
    folder = config.objective.teacher
    if folder is None:
        return build_model
    if config.objective.kind == "distill" and config.objective.kl == 0:
        # Not a rule of the configuration, because older runs have recorded it.
        raise UserError(
            "objective.kl=0 leaves the teacher nothing to teach; take objective.kind: labels, or set kl above 0"
        )
    source = WeightSource.find("objective.teacher", folder, ranks)
    ranks.on_rank_zero(lambda: source.check_tokenizer(corpora))
    return partial(_with_teacher, config, source)


def _with_teacher(
    config: Config, source: WeightSource, settings: ModelSettings, loss_scale: Callable[[], float]
) -> LocalModel:
    assert isinstance(settings.mesh, Mesh)
    wanted, tensor, stages = source.model(), settings.mesh.tp.size, settings.mesh.pp.size
    if wanted.kind != settings.model.kind:
        raise UserError(
            f"{source.key}={source.folder} is a {wanted.kind} and model.kind={settings.model.kind}: they do not "
            "predict the same tokens; give a teacher of the same kind"
        )
    if any(heads_over_tensor_ranks(wanted, tensor)) or wanted.num_layers < stages:
        raise UserError(
            f"{source.key}={source.folder} has {wanted.num_layers} layers of {wanted.num_heads} heads and "
            f"{wanted.kv_heads} key heads, which parallel.pipeline={stages} and parallel.tensor={tensor} cannot "
            "partition; set sizes that divide its own"
        )
    teacher = Teacher(frozen_model(settings, wanted, source, DTYPES[config.training.dtype]))
    model = TaughtPipeline(settings, loss_scale) if settings.mesh.pp.size > 1 else TaughtModel(settings)
    objective = LayerTransfer if config.objective.kind == "transfer" else Distillation
    model.objective = objective(model, teacher, config, settings.mesh)
    return model


class _WithObjective:
    """The objective of both models below, and their methods for it."""

    objective: Distillation | LayerTransfer
    """The training loss. Not a submodule, so that neither the optimizer nor a checkpoint includes its teacher."""

    def begin_step(self, step: int) -> None:
        """Do what `LanguageModel.begin_step` does."""
        self.objective.begin_step(step)

    def scalars(self) -> dict[str, float]:
        """Return what `LanguageModel.scalars` does."""
        return self.objective.scalars()


class TaughtModel(_WithObjective, LanguageModel):
    """A model whose training loss is that of its objective; in evaluation it is a plain `LanguageModel`."""

    def forward(self, *inputs: Tensor) -> Any:
        """Return the objective's loss in training, and what `LanguageModel.forward` does in evaluation."""
        return self.objective(inputs) if self.training else super().forward(*inputs)


class TaughtPipeline(_WithObjective, Pipeline):
    """The same for a pipeline stage, whose teacher has the same layers."""

    def forward(self, inputs: LayerInputs) -> Any:
        """Return the stage's outputs; on the last stage the loss."""
        return self.objective(inputs) if self.training else super().forward(inputs)
