"""A trained model in this process alone, to evaluate and to generate with."""

from pathlib import Path

import torch
from torch import Tensor

from megakernel.config import Config, UserError
from megakernel.model import LanguageModel, cast, rotate_by
from megakernel.model.settings import DTYPES, model_settings
from megakernel.parallel import OneProcess

from .dense import DenseCheckpoint
from .files import CheckpointTensors
from .trained_run import TrainedRun
from .universal import WEIGHT, WholeTensors


def one_process_model(run: TrainedRun, vocab_size: int, device: torch.device) -> LanguageModel:
    """The run's whole model on `device` and in the dtype of training, in evaluation mode.

    vocab_size: ids of the run's tokenizer. It starts no process group and loads neither Megatron-core nor DeepSpeed.
    Raises UserError where the checkpoint is of another model or vocabulary.
    """
    model = LanguageModel(model_settings(run.config, OneProcess(), vocab_size))
    # A run whose sequences grow may change its frequencies with them: the weights know those they were trained with.
    rotate_by(model, run.config.training.phase_behind(run.checkpoint.step).model(run.config.model))
    remedy = "restore config.yaml and the corpus of data.train as they were in training"
    _fill(model, CheckpointTensors(run.checkpoint), run.checkpoint.folder, "its run's config.yaml", remedy)
    return cast(model, DTYPES[run.config.training.dtype]).to(device).eval()


def dense_model(folder: Path, config: Config, vocab_size: int, device: torch.device) -> LanguageModel:
    """The same for a folder in the Hugging Face form, whose model section is that of `config`."""
    model = LanguageModel(model_settings(config, OneProcess(), vocab_size))
    tensors = DenseCheckpoint(folder, config.model.vocab_multiple)
    _fill(model, tensors, folder, "its config.json", "download it again")
    return cast(model, DTYPES[config.training.dtype]).to(device).eval()


@torch.no_grad()
def _fill(model: LanguageModel, tensors: WholeTensors, source: Path, described: str, remedy: str) -> None:
    def refused(reason: str) -> UserError:
        return UserError(f"{source} does not fit the model of {described} ({reason}); {remedy}")

    targets = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    if differing := sorted(targets.keys() ^ tensors.names):
        raise refused(f"{differing[0]} is on one side only")
    for name, target in targets.items():
        weight = tensors.read(name, [WEIGHT])[WEIGHT]
        if weight.shape != target.shape:
            raise refused(f"{name} is {tuple(weight.shape)} there, {tuple(target.shape)} here")
        target.copy_(weight)
