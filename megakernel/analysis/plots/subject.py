"""The input of an analysis: a model, samples, and the captured inputs of its attention layers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from data_pipeline.batch import Batch
from megakernel.attention import WHOLE_SEQUENCE, AttentionLayer
from megakernel.config import Config, Model, UserError
from megakernel.model import LanguageModel
from megakernel.model.layer import attention_cores
from megakernel.model.layer_inputs import LayerInputs, to_layer_inputs
from megakernel.model.self_attention import SelfAttention
from megakernel.uptraining.sampled_queries import CapturedInputs


class CapturedAttention(NamedTuple):
    """Inputs and output of one attention layer in a forward pass."""

    core: AttentionLayer
    inputs: CapturedInputs
    """The layer's arguments; if it `compresses_input`, k and v are landmarks; projected mixtures have M keys in k."""

    output: Tensor
    """(1, H, N, D)"""

    @property
    def is_finite(self) -> bool:
        """Whether inputs and output are finite; after a divergence they may not be."""
        inputs = self.inputs
        return all(bool(x.isfinite().all()) for x in (inputs.q, inputs.k, inputs.v, self.output))


def first_sequence(layer_inputs: LayerInputs, length: int) -> LayerInputs:
    """Tokens and positions (1, n) of the first sequence of inputs: at most `length` tokens, without padding.

    If a shard's first document began on another rank, its positions count from the shard's start.
    """
    tokens, positions = layer_inputs[:2]
    real = positions[0] >= 0
    tokens, positions = tokens[:1, real][:, :length], positions[:1, real][:, :length]
    from_other_rank = (positions == 0).cumsum(1) == 0
    return tokens, positions.where(~from_other_rank, positions - positions[:, :1])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; in training, layers may close windows (near_dropout) or count tokens for an M-step."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@torch.no_grad()
def captured_attention(model: LanguageModel, row: LayerInputs) -> dict[int, CapturedAttention]:
    """Layer -> its captured inputs and output for `row` (of `first_sequence`), with the heads of this tensor rank.

    `row` is treated as a whole sequence, also on context ranks. Runs in evaluation mode and restores the model's mode.
    """
    captured: dict[int, CapturedAttention] = {}

    def hook_of(index: int) -> Any:
        def hook(core: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            assert isinstance(core, AttentionLayer)
            captured[index] = CapturedAttention(core, CapturedInputs.of(*args), output)

        return hook

    hooks = [core.register_forward_hook(hook_of(index)) for index, core in attention_cores(model).items()]
    shards = {module: module.cp_shard for module in model.modules() if isinstance(module, SelfAttention)}
    try:
        for layer in shards:
            layer.cp_shard = WHOLE_SEQUENCE
        with evaluating(model):
            model.body(row)
    finally:
        for hook in hooks:
            hook.remove()
        for layer, cp_shard in shards.items():
            layer.cp_shard = cp_shard
    return captured


@dataclass(frozen=True)
class Subject:
    """A checkpoint, and the validation samples to analyze it with."""

    config: Config
    """The configuration of the run."""

    model: LanguageModel
    """The whole model, float32, in evaluation mode."""

    batches: Sequence[Batch]
    """One sample each."""

    device: torch.device

    seq_len: int
    """Maximum tokens of a sequence."""

    draws: int = 100
    """Draws of noise, for analyses of its effects."""

    name: str = "the model"
    """The checkpoint, in messages."""

    def captured(
        self, model: LanguageModel | None = None, samples: int | None = None
    ) -> Iterator[tuple[int, int, CapturedAttention]]:
        """(sample, layer, captured attention) for each sample's sequence; of two documents in a sample, the first.

        model: used instead of the run's. samples: of the first ones only.
        Raises UserError if the numbers are not finite, as those of a model that has diverged.
        """
        for sample, batch in enumerate(self.batches[:samples]):
            row = first_sequence((batch.tokens, batch.positions), self.seq_len)
            layers = captured_attention(model or self.model, tuple(part.to(self.device) for part in row))
            for layer, captured in layers.items():
                if not captured.is_finite:
                    raise UserError(
                        f"in {self.name} the numbers of layer {layer}'s attention are not finite; give an earlier one "
                        "with --step"
                    )
                yield sample, layer, captured

    def model_inputs(self) -> list[LayerInputs]:
        """The samples as inputs of the model's first layer; their losses add up to the mean over all labels."""
        total = sum(int(batch.loss_mask.sum()) for batch in self.batches)
        targets = torch.tensor([max(total, 1)], device=self.device)
        return [to_layer_inputs(batch, targets) for batch in self.batches]

    def untrained(self, model: Model | None = None) -> LanguageModel:
        """A model with initial weights, of this configuration (None: the run's), in evaluation mode."""
        settings = self.model.settings
        if model is not None:
            settings = replace(settings, model=model)
        return LanguageModel(settings).to(self.device).eval()
