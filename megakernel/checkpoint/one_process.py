"""A trained model in this process alone, to evaluate and to generate with."""

import torch
from torch import Tensor

from megakernel.config import UserError
from megakernel.model import LanguageModel, cast, rotate_by
from megakernel.model.settings import DTYPES, model_settings
from megakernel.parallel import OneProcess

from .files import CheckpointTensors
from .manifest import Checkpoint
from .trained_run import TrainedRun
from .universal import WEIGHT


def one_process_model(run: TrainedRun, vocab_size: int, device: torch.device) -> LanguageModel:
    """The run's whole model on `device` and in the dtype of training, in evaluation mode.

    vocab_size: ids of the run's tokenizer. It starts no process group and loads neither Megatron-core nor DeepSpeed.
    """
    model = LanguageModel(model_settings(run.config, OneProcess(), vocab_size))
    # A run whose rows grow may change its frequencies with them: the weights know those they were trained with.
    rotate_by(model, run.config.training.phase_behind(run.checkpoint.step).model(run.config.model))
    load_whole_weights(model, run.checkpoint)
    return cast(model, DTYPES[run.config.training.dtype]).to(device).eval()


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
