"""Losses of models on a run's validation samples, without training."""

from typing import Any

import torch
from torch import Tensor

from data_pipeline.corpus import Corpora
from data_pipeline.loader import ValidationBatches
from megakernel.checkpoint.frozen import before_head, frozen_model
from megakernel.checkpoint.weight_source import WeightSource
from megakernel.config import Config, Model
from megakernel.model import LanguageModel
from megakernel.model.head import token_losses
from megakernel.model.layer_inputs import IGNORED, LayerInputs
from megakernel.model.settings import DTYPES, model_settings
from megakernel.parallel import Mesh
from megakernel.training.engine import means, model_inputs, reading


def measured_on(config: Config) -> dict[str, Any]:
    """What losses depend on and a run may change while it goes on, as JSON has it: which samples are read."""
    return {
        "eval_samples": config.training.eval_samples,
        "eval_seq_len": config.training.evaluation_len,
        "validation": [corpus.model_dump(mode="json") for corpus in config.data.validation_corpora],
    }


class Validation:
    """Losses on the validation samples of a run, over all of its ranks, of models that are not trained.

    Called on all ranks, which get the same. Of a pipeline a model here is this stage's layers.
    """

    def __init__(self, config: Config, mesh: Mesh):
        self.config, self.mesh = config, mesh
        self.corpora = Corpora(config.data, validation=True)
        self.settings = model_settings(config, mesh, self.corpora.vocab_size)
        batches = list(ValidationBatches(config, self.corpora, **reading(mesh)))
        self._model_inputs = model_inputs(batches, mesh)

    def model(self, model: Model, source: WeightSource, dtype: torch.dtype | None = None) -> LanguageModel:
        """A frozen model with the weights of `source`, in training's dtype where None; see `frozen_model`."""
        return frozen_model(self.settings, model, source, dtype or DTYPES[self.config.training.dtype])

    def losses(self, model: LanguageModel, window: int, tokens: int | None = None) -> tuple[float, float]:
        """Nats per token, of all tokens, and of those with at least `window` others of their document before them.

        tokens: read so many at the beginning of each sequence alone.
        """
        read = [
            tuple(part[:, :tokens] if part.dim() == 2 else part for part in one) for one in self._model_inputs
        ]
        shares = means(lambda *inputs: self._share(model, inputs, window), read, self.mesh)
        every, beyond, count, count_beyond = self.mesh.sum(shares, self.mesh.pp).tolist()
        return every / max(count, 1), beyond / max(count_beyond, 1)

    def _share(self, model: LanguageModel, inputs: LayerInputs, window: int) -> Tensor:
        """float64 (4,): what this stage knows of a micro-batch's two sums and their tokens; on the last one all."""
        entering = before_head(model, inputs, self.mesh)
        if entering is None:
            return torch.zeros(4, dtype=torch.float64, device=self.mesh.device)
        hidden, positions, labels, _ = entering
        losses = token_losses(model.output_matrix, hidden, labels, model.settings).view(labels.T.shape).T
        has_label = labels != IGNORED
        counted = torch.stack([has_label, has_label & (positions >= window)])
        return torch.cat([(losses.double() * counted).sum((1, 2)), counted.double().sum((1, 2))])
