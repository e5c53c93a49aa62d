"""A trained model in this process alone, to evaluate and to generate with."""

import torch

from megakernel.model import LanguageModel, cast, rotate_by
from megakernel.parallel import OneProcess

from .dtypes import DTYPES
from .model_settings import model_settings
from .trained_run import TrainedRun
from .weights import load_whole_weights


def one_process_model(run: TrainedRun, vocab_size: int, device: torch.device) -> LanguageModel:
    """The run's whole model on `device` and in the dtype of training, in evaluation mode.

    vocab_size: ids of the run's tokenizer. It starts no process group and loads neither Megatron-core nor DeepSpeed.
    """
    model = LanguageModel(model_settings(run.config, OneProcess(), vocab_size))
    # A run whose rows grow may change its frequencies with them: the weights know those they were trained with.
    rotate_by(model, run.config.training.phase_behind(run.checkpoint.step).model(run.config.model))
    load_whole_weights(model, run.checkpoint)
    return cast(model, DTYPES[run.config.training.dtype]).to(device).eval()
