"""Losses of frozen models on a run's validation samples."""

from typing import Any

import torch
from torch import Tensor

from data_pipeline.loader import ValidationBatches
from megakernel.checkpoint.frozen import frozen_model, head_inputs
from megakernel.checkpoint.weight_source import WeightSource
from megakernel.config import Config, Model, UserError
from megakernel.model import LanguageModel
from megakernel.model.head import token_losses
from megakernel.model.layer_inputs import IGNORED, LayerInputs
from megakernel.model.settings import DTYPES, model_settings
from megakernel.parallel import Mesh
from megakernel.training.data import build_indices, open_corpora
from megakernel.training.engine import counted_labels, loader_arguments, means, model_inputs


def measured_on(config: Config) -> dict[str, Any]:
    """The keys that determine the validation samples and may change between two starts of a run, for JSON."""
    return {
        "eval_samples": config.training.eval_samples,
        "eval_seq_len": config.training.evaluation_len,
        "validation": [corpus.model_dump(mode="json") for corpus in config.data.corpora_of("validation")],
    }


class Validation:
    """Losses of frozen models on the validation samples of a run, over all of its ranks.

    Called on all ranks, which get the same. With a pipeline a model has this stage's layers.
    """

    def __init__(self, config: Config, mesh: Mesh):
        self.config, self.mesh = config, mesh
        self.corpora = open_corpora(config, mesh, [config.run.folder])
        self.settings = model_settings(config, mesh, self.corpora.vocab_size)
        batches = ValidationBatches(config, self.corpora, **loader_arguments(mesh))
        build_indices(config, mesh, batches)
        read = list(batches)
        if counted_labels(read, mesh).item() == 0:
            raise UserError(
                f"training.eval_samples={config.training.eval_samples}: no token of the validation samples counts in "
                "the loss; give more samples"
            )
        self._model_inputs = model_inputs(read, mesh)

    def model(self, model: Model, source: WeightSource, dtype: torch.dtype | None = None) -> LanguageModel:
        """Build a frozen model with the weights of `source`, see `frozen_model`; dtype: None for that of training."""
        return frozen_model(self.settings, model, source, dtype or DTYPES[self.config.training.dtype])

    def losses(self, model: LanguageModel, window: int, tokens: int | None = None) -> tuple[float, float]:
        """Nats per token of all tokens, and of those with at least `window` tokens of their document before them.

        tokens: use only so many tokens at the start of each sequence.
        """
        batches = [
            tuple(x[:, :tokens] if x.dim() == 2 else x for x in inputs) for inputs in self._model_inputs
        ]
        sums = means(lambda *inputs: self._loss_sums(model, inputs, window), batches, self.mesh)
        total, beyond, count, count_beyond = self.mesh.sum(sums, self.mesh.pp).tolist()
        return total / max(count, 1), beyond / max(count_beyond, 1)

    def _loss_sums(self, model: LanguageModel, inputs: LayerInputs, window: int) -> Tensor:
        """float64 (4,): both sums of losses and their token counts for a micro-batch; 0 except on the last stage."""
        at_head = head_inputs(model, inputs, self.mesh)
        if at_head is None:
            return torch.zeros(4, dtype=torch.float64, device=self.mesh.device)
        hidden, positions, labels, _ = at_head
        losses = token_losses(model.output_matrix, hidden, labels, model.settings).view(labels.T.shape).T
        has_label = labels != IGNORED
        counted = torch.stack([has_label, has_label & (positions >= window)])
        return torch.cat([(losses.double() * counted).sum((1, 2)), counted.double().sum((1, 2))])
