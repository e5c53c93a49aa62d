"""The model that lowers what the objective section names."""

from collections.abc import Callable
from functools import partial

from megakernel.config import Config
from megakernel.model import LanguageModel, ModelSettings
from megakernel.training.dtypes import DTYPES
from megakernel.training.ranks import Ranks
from megakernel.training.weight_source import WeightSource

from .distilled import DistilledModel
from .frozen import frozen_model
from .teacher import Teacher
from .transferred import TransferModel


def model_maker(config: Config, ranks: Ranks) -> Callable[[ModelSettings], LanguageModel]:
    """What makes the model of a process that holds all layers.

    Raises UserError, alike on all ranks, for a teacher that is not there.
    """
    folder = config.objective.teacher
    if folder is None:
        return LanguageModel
    return partial(_with_teacher, config, ranks.first(lambda: WeightSource.find("objective.teacher", folder)))


def _with_teacher(config: Config, source: WeightSource, settings: ModelSettings) -> LanguageModel:
    teacher = Teacher(frozen_model(settings, source.model(), source, DTYPES[config.training.dtype]))
    made = {"distill": DistilledModel, "transfer": TransferModel}[config.objective.kind]
    return made(settings, config, teacher)
