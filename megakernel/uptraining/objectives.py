"""The model that lowers what the objective section names."""

from collections.abc import Callable
from functools import partial

from data_pipeline.corpus import Corpora
from megakernel.checkpoint.frozen import frozen_model
from megakernel.checkpoint.weight_source import WeightSource
from megakernel.config import Config
from megakernel.model import ModelSettings, Parted, build_model
from megakernel.model.settings import DTYPES
from megakernel.parallel import Mesh
from megakernel.parallel.ranks import Ranks

from .distilled import DistilledModel, DistilledPipeline, Teacher
from .transferred import TransferModel, TransferPipeline


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
    teacher = Teacher(frozen_model(settings, source.model(), source, DTYPES[config.training.dtype]))
    assert isinstance(settings.mesh, Mesh)
    transfers = config.objective.kind == "transfer"
    if settings.mesh.pp.size > 1:
        stage = TransferPipeline if transfers else DistilledPipeline
        return stage(settings, loss_scale, config, teacher)
    return (TransferModel if transfers else DistilledModel)(settings, config, teacher)
