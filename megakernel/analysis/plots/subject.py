"""The input of an analysis: a model, samples, and the captured inputs of its attention layers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from data_pipeline.batch import Batch
from megakernel.attention import WHOLE, AttentionLayer
from megakernel.config import Config, Model
from megakernel.model import LanguageModel
from megakernel.model.layer import attention_cores
from megakernel.model.layer_inputs import LayerInputs, inputs_of
from megakernel.model.self_attention import SelfAttention
from megakernel.uptraining.sampled_queries import CapturedInputs


class CapturedAttention(NamedTuple):
    """One attention layer's part in reading a sequence."""

    core: AttentionLayer
    inputs: CapturedInputs
    """Its arguments. Of a layer that `compresses_input` k and v are landmarks; of projected mixtures k has M keys."""

    output: Tensor
    """(1, H, N, D)"""


def first_row(layer_inputs: LayerInputs, length: int) -> LayerInputs:
    """Tokens and positions (1, n) of the first sequence of inputs: its real tokens alone, at most `length`.

    Of a shard of a sequence whose document began on another rank, positions count from the shard's start.
    """
    tokens, positions = layer_inputs[:2]
    real = positions[0] >= 0
    tokens, positions = tokens[:1, real][:, :length], positions[:1, real][:, :length]
    begun = (positions == 0).cumsum(1) == 0
    return tokens, positions.where(~begun, positions - positions[:, :1])


@torch.no_grad()
def captured_attention(model: LanguageModel, row: LayerInputs) -> dict[int, CapturedAttention]:
    """Layer -> its part in reading `row` of `first_row`, with the heads of this tensor rank.

    The sequence is taken whole, also by a rank that trains on shards of sequences. Evaluation mode; the model ends as
    it began.
    """
    captured: dict[int, CapturedAttention] = {}

    def listener(index: int) -> Any:
        def listen(core: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            assert isinstance(core, AttentionLayer)
            captured[index] = CapturedAttention(core, CapturedInputs.of(*args), output)

        return listen

    hooks = [core.register_forward_hook(listener(index)) for index, core in attention_cores(model).items()]
    modes = {module: module.training for module in model.modules()}
    shards = {module: module.cp_shard for module in modes if isinstance(module, SelfAttention)}
    try:
        model.eval()
        for layer in shards:
            layer.cp_shard = WHOLE
        model.body(row)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
        for layer, cp_shard in shards.items():
            layer.cp_shard = cp_shard
    return captured


@dataclass(frozen=True)
class Subject:
    """A checkpoint and the validation samples to look at it with."""

    config: Config
    """The configuration of the run."""

    model: LanguageModel
    """The whole model, float32, in evaluation mode."""

    batches: Sequence[Batch]
    """One sample each."""

    device: torch.device

    seq_len: int
    """Tokens of a sequence at most."""

    draws: int = 100
    """Draws of noise, for analyses of what it does."""

    def captured(self, model: LanguageModel | None = None) -> Iterator[tuple[int, int, CapturedAttention]]:
        """Sample, layer, and what that is called with in reading the sample's sequence, the first of two documents.

        model: another than the run's.
        """
        for sample, batch in enumerate(self.batches):
            row = first_row((batch.tokens, batch.positions), self.seq_len)
            layers = captured_attention(model or self.model, tuple(part.to(self.device) for part in row))
            for layer, captured in layers.items():
                yield sample, layer, captured

    def model_inputs(self) -> list[LayerInputs]:
        """The samples as the model's first layer reads them, a label of all of them counting as 1 / their number."""
        total = sum(int(batch.loss_mask.sum()) for batch in self.batches)
        targets = torch.tensor([max(total, 1)], device=self.device)
        return [inputs_of(batch, targets) for batch in self.batches]

    def untrained(self, model: Model | None = None) -> LanguageModel:
        """A model of this section, or of the run's, as training would begin with it; in evaluation mode."""
        settings = self.model.settings
        if model is not None:
            settings = replace(settings, model=model)
        return LanguageModel(settings).to(self.device).eval()
