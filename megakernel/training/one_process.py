"""A trained model in this process alone, to evaluate and to generate with."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megakernel.config import Parallel
from megakernel.model import LanguageModel, cast, rotate_by
from megakernel.parallel import Mesh
from megakernel.parallel.processes import ProcessEnvironment

from .dtypes import DTYPES
from .model_settings import model_settings
from .trained_run import TrainedRun
from .weights import load_whole_weights


@contextmanager
def one_process_model(run: TrainedRun, vocab_size: int, device: torch.device) -> Iterator[LanguageModel]:
    """The run's whole model on `device` and in the dtype of training, in evaluation mode.

    vocab_size: ids of the run's tokenizer. Process groups live while the context does; one context at a time.
    """
    mesh = Mesh.create(Parallel(), ProcessEnvironment(), device)
    try:
        model = LanguageModel(model_settings(run.config, mesh, vocab_size))
        # A run whose rows grow may change its frequencies with them: the weights know those they were trained with.
        rotate_by(model, run.config.training.phase_behind(run.checkpoint.step).model(run.config.model))
        load_whole_weights(model, run.checkpoint)
        yield cast(model, DTYPES[run.config.training.dtype]).to(device).eval()
    finally:
        mesh.destroy()
