"""The weights of a checkpoint in one process, whatever layout wrote it."""

from pathlib import Path

import torch
from torch import Tensor

from megakernel.config import UserError
from megakernel.model import LanguageModel


def load_weights(model: LanguageModel, checkpoint: Path) -> None:
    """Fill a model that holds all its layers and heads from a checkpoint folder.

    Raises UserError where the checkpoint is of another model or vocabulary.
    """
    weights = _whole_weights(checkpoint)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip()
        raise UserError(
            f"{checkpoint} does not fit the model of its config.yaml ({first}); "
            "restore config.yaml and the corpus of data.train as they were in training"
        ) from None


def _whole_weights(checkpoint: Path) -> dict[str, Tensor]:
    # Mapped, so that the optimizer's moments beside the weights are not read.
    file = checkpoint / "mp_rank_00_model_states.pt"
    return torch.load(file, map_location="cpu", mmap=True, weights_only=True)["module"]
