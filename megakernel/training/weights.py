"""The weights of a checkpoint in one process, whatever layout wrote it."""

import torch
from torch import Tensor

from megakernel.config import UserError
from megakernel.model import LanguageModel

from .checkpoint import Checkpoint
from .checkpoint_files import CheckpointTensors
from .universal import WEIGHT


@torch.no_grad()
def load_whole_weights(model: LanguageModel, checkpoint: Checkpoint) -> None:
    """Fill a model that holds all its layers and heads.

    Raises UserError where the checkpoint is of another model or vocabulary.
    """
    tensors = CheckpointTensors(checkpoint)
    targets = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    if differing := sorted(targets.keys() ^ tensors.names):
        raise _does_not_fit(checkpoint, f"{differing[0]} is on one side only")
    for name, target in targets.items():
        weight = tensors.read(name, [WEIGHT])[WEIGHT]
        if weight.shape != target.shape:
            raise _does_not_fit(
                checkpoint, f"{name} is {tuple(weight.shape)} there, {tuple(target.shape)} here"
            )
        target.copy_(weight)


def _does_not_fit(checkpoint: Checkpoint, reason: str) -> UserError:
    return UserError(
        f"{checkpoint.folder} does not fit the model of its run's config.yaml ({reason}); "
        "restore config.yaml and the corpus of data.train as they were in training"
    )
