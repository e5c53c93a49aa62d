"""What the attention layers of a model are called with while it reads one row."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megakernel.attention import WHOLE, AttentionLayer
from megakernel.model import LanguageModel
from megakernel.model.self_attention import SelfAttention
from megakernel.model.stream import Stream
from megakernel.uptraining.core_call import CoreCall
from megakernel.uptraining.layers import attention_cores


class Heard(NamedTuple):
    """One attention layer's part in reading a row."""

    core: AttentionLayer
    call: CoreCall
    """Its arguments. Of a layer that `compresses_input` k and v are landmarks; of projected mixtures k has M keys."""

    output: Tensor
    """(1, H, N, D)"""


def first_row(stream: Stream, length: int) -> Stream:
    """Tokens and positions (1, n) of the first row of a stream: its real tokens alone, at most `length`.

    Of a piece of a row whose document began on another rank, positions count from the piece's start.
    """
    tokens, positions = stream[:2]
    real = positions[0] >= 0
    tokens, positions = tokens[:1, real][:, :length], positions[:1, real][:, :length]
    begun = (positions == 0).cumsum(1) == 0
    return tokens, positions.where(~begun, positions - positions[:, :1])


@torch.no_grad()
def attention_calls(model: LanguageModel, row: Stream) -> dict[int, Heard]:
    """Layer -> its part in reading `row` of `first_row`, with the heads of this tensor rank.

    The row is taken whole, also by a rank that trains on pieces of rows. Evaluation mode; the model ends as it began.
    """
    heard: dict[int, Heard] = {}

    def listener(index: int) -> Any:
        def listen(core: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            assert isinstance(core, AttentionLayer)
            heard[index] = Heard(core, CoreCall.of(args, kwargs), output)

        return listen

    hooks = [
        core.register_forward_hook(listener(index), with_kwargs=True)
        for index, core in attention_cores(model).items()
    ]
    try:
        with _evaluating(model), _whole_rows(model):
            model.body(row)
    finally:
        for hook in hooks:
            hook.remove()
    return heard


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
    pieces = [layer.piece for layer in layers]
    for layer in layers:
        layer.piece = WHOLE
    try:
        yield
    finally:
        for layer, piece in zip(layers, pieces):
            layer.piece = piece
