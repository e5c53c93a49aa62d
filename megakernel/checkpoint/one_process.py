"""A trained model in a single process, for evaluation and generation."""

from pathlib import Path

import torch
from torch import Tensor

from megakernel.config import Config, UserError
from megakernel.model import LanguageModel, cast, set_rotary
from megakernel.model.settings import DTYPES, model_settings
from megakernel.parallel import OneProcess

from .dense import DenseCheckpoint
from .files import CheckpointTensors
from .trained_run import TrainedRun
from .whole_tensors import WEIGHT, WholeTensors


def one_process_model(run: TrainedRun, vocab_size: int, device: torch.device) -> LanguageModel:
    """The run's whole model on `device`, in the dtype of training and in evaluation mode.

    vocab_size: ids of the run's tokenizer. It starts no process group and imports neither Megatron-core nor DeepSpeed.
    Raises UserError if the checkpoint has another model or vocabulary.
    """
    model = LanguageModel(model_settings(run.config, OneProcess(), vocab_size))
    # Rotary frequencies may change with a run's sequence length; the checkpoint needs those of its last phase.
    set_rotary(model, run.config.training.last_trained_phase(run.checkpoint.step).model(run.config.model))
    remedy = "restore config.yaml and the corpus of data.train as they were in training"
    _load(model, CheckpointTensors(run.checkpoint), run.checkpoint.folder, "its run's config.yaml", remedy)
    return cast(model, DTYPES[run.config.training.dtype]).to(device).eval()


def dense_model(folder: Path, config: Config, vocab_size: int, device: torch.device) -> LanguageModel:
    """The same for a Hugging Face folder, whose model section `config` has."""
    model = LanguageModel(model_settings(config, OneProcess(), vocab_size))
    tensors = DenseCheckpoint(folder, config.model.vocab_multiple)
    _load(model, tensors, folder, "its config.json", "download it again")
    return cast(model, DTYPES[config.training.dtype]).to(device).eval()


@torch.no_grad()
def _load(model: LanguageModel, tensors: WholeTensors, source: Path, described: str, remedy: str) -> None:
    def misfit(reason: str) -> UserError:
        return UserError(f"{source} does not fit the model of {described} ({reason}); {remedy}")

    targets = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    if differing := sorted(targets.keys() ^ tensors.names):
        raise misfit(f"{differing[0]} is on one side only")
    for name, target in targets.items():
        weight = tensors.read(name, [WEIGHT])[WEIGHT]
        if weight.shape != target.shape:
            raise misfit(f"{name} is {tuple(weight.shape)} there, {tuple(target.shape)} here")
        target.copy_(weight)
