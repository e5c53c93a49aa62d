"""What the attention layers of a model are called with while it reads one row."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megakernel.attention import WHOLE, AttentionLayer
from megakernel.model import LanguageModel
from megakernel.model.layer import attention_cores
from megakernel.model.layer_inputs import LayerInputs
from megakernel.model.self_attention import SelfAttention
from megakernel.uptraining.attention_inputs import AttentionInputs


class CapturedAttention(NamedTuple):
    """One attention layer's part in reading a row."""

    core: AttentionLayer
    inputs: AttentionInputs
    """Its arguments. Of a layer that `compresses_input` k and v are landmarks; of projected mixtures k has M keys."""

    output: Tensor
    """(1, H, N, D)"""


def first_row(layer_inputs: LayerInputs, length: int) -> LayerInputs:
    """Tokens and positions (1, n) of the first row of inputs: its real tokens alone, at most `length`.

    Of a shard of a row whose document began on another rank, positions count from the shard's start.
    """
    tokens, positions = layer_inputs[:2]
    real = positions[0] >= 0
    tokens, positions = tokens[:1, real][:, :length], positions[:1, real][:, :length]
    begun = (positions == 0).cumsum(1) == 0
    return tokens, positions.where(~begun, positions - positions[:, :1])


@torch.no_grad()
def captured_attention(model: LanguageModel, row: LayerInputs) -> dict[int, CapturedAttention]:
    """Layer -> its part in reading `row` of `first_row`, with the heads of this tensor rank.

    The row is taken whole, also by a rank that trains on shards of rows. Evaluation mode; the model ends as it began.
    """
    captured: dict[int, CapturedAttention] = {}

    def listener(index: int) -> Any:
        def listen(core: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            assert isinstance(core, AttentionLayer)
            captured[index] = CapturedAttention(core, AttentionInputs.of(*args), output)

        return listen

    hooks = [core.register_forward_hook(listener(index)) for index, core in attention_cores(model).items()]
    try:
        with _evaluating(model), _whole_rows(model):
            model.body(row)
    finally:
        for hook in hooks:
            hook.remove()
    return captured


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _whole_rows(model: nn.Module) -> Iterator[None]:
    layers = [module for module in model.modules() if isinstance(module, SelfAttention)]
    shards = [layer.cp_shard for layer in layers]
    for layer in layers:
        layer.cp_shard = WHOLE
    try:
        yield
    finally:
        for layer, cp_shard in zip(layers, shards):
            layer.cp_shard = cp_shard
