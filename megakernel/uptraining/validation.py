"""Losses of models on a run's validation samples, without training."""

from dataclasses import replace

import torch
from torch import Tensor

from data_pipeline.corpus import Corpora
from data_pipeline.loader import ValidationBatches
from megakernel.config import Config, Model
from megakernel.model import LanguageModel
from megakernel.model.stream import Stream
from megakernel.parallel import Mesh
from megakernel.training.dtypes import DTYPES
from megakernel.training.model_settings import model_settings
from megakernel.training.reading import reading
from megakernel.training.streams import means, streams
from megakernel.training.weight_source import WeightSource

from .frozen import frozen_model
from .handed_on import before_head


class Validation:
    """Losses on the validation samples of a run, over all of its ranks, of models that are not trained.

    Called on all ranks, which get the same. Of a pipeline a model here is this stage's layers.
    """

    def __init__(self, config: Config, mesh: Mesh):
        self.config, self.mesh = config, mesh
        self.corpora = Corpora(config.data, validation=True)
        self.settings = model_settings(config, mesh, self.corpora.vocab_size)
        self._batches = list(ValidationBatches(config, self.corpora, **reading(mesh)))
        self._streams: dict[int, list[Stream]] = {}

    def model(self, model: Model, source: WeightSource) -> LanguageModel:
        """A frozen model with the weights of `source`; see `frozen_model`."""
        return frozen_model(self.settings, model, source, DTYPES[self.config.training.dtype])

    def losses(self, model: LanguageModel, window: int) -> tuple[float, float]:
        """`loss` of all tokens, and of those beyond the window."""
        return self.loss(model), self.loss(model, window)

    def loss(self, model: LanguageModel, beyond: int = 0) -> float:
        """Nats per token, in evaluation; of the tokens with at least `beyond` others of their document before them."""
        if beyond not in self._streams:
            counted = [
                replace(batch, loss_mask=batch.loss_mask & (batch.positions >= beyond))
                for batch in self._batches
            ]
            self._streams[beyond] = streams(counted, self.mesh)
        shares = means(lambda *stream: self._share(model, stream), self._streams[beyond], self.mesh)
        return float(self.mesh.sum(shares, self.mesh.pp))

    def _share(self, model: LanguageModel, stream: Stream) -> Tensor:
        """What this stage knows of the loss of a micro-batch: on the last one all of it."""
        entering = before_head(model, stream, self.mesh)
        if entering is None:
            return torch.zeros((), device=self.mesh.device)
        loss: Tensor = model.walk[-1](entering)
        return loss
