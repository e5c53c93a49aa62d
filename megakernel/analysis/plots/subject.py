"""What an analysis is given."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from data_pipeline.batch import Batch
from megakernel.config import Config, Model
from megakernel.model import IGNORED, LanguageModel
from megakernel.model.layer_inputs import LayerInputs

from .capture import CapturedAttention, captured_attention, first_row


@dataclass(frozen=True)
class Subject:
    """A checkpoint and the validation samples to look at it with."""

    config: Config
    """What the run was trained with."""

    model: LanguageModel
    """The whole model, float32, in evaluation mode."""

    batches: Sequence[Batch]
    """One sample each."""

    device: torch.device

    seq_len: int
    """Tokens of a row at most."""

    draws: int = 100
    """Draws of noise, for analyses of what it does."""

    def captured(self) -> Iterator[dict[int, CapturedAttention]]:
        """For each sample, what each layer is called with in reading its row, the first of two documents."""
        for batch in self.batches:
            row = first_row((batch.tokens, batch.positions), self.seq_len)
            yield captured_attention(self.model, tuple(part.to(self.device) for part in row))

    def model_inputs(self) -> list[LayerInputs]:
        """The samples as the model's first layer reads them, a label of all of them counting as 1 / their number."""
        total = sum(int(batch.loss_mask.sum()) for batch in self.batches)
        targets = torch.tensor([max(total, 1)], device=self.device)
        found: list[LayerInputs] = []
        for batch in self.batches:
            labels = batch.labels.where(batch.loss_mask, IGNORED)
            parts = (batch.tokens, batch.positions, labels)
            found.append((*(part.to(self.device) for part in parts), targets))
        return found

    def untrained(self, model: Model | None = None) -> LanguageModel:
        """A model of this section, or of the run's, as training would begin with it; in evaluation mode."""
        settings = self.model.settings
        if model is not None:
            settings = replace(settings, model=model)
        return LanguageModel(settings).to(self.device).eval()
