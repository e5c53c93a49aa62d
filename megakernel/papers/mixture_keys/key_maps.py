"""Keys as heat maps: the matrices that make them, and those of a sequence.

`key_weights`: W_K of every head, and of every key of projected mixtures (Transformer-MGK, figure 13). `keys`: the keys
of the first tokens of a sequence (figure 14), all of a mixture's, before rotation.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megakernel.analysis.plots.subject import CapturedAttention, Subject
from megakernel.analysis.plots.table import Row
from megakernel.attention.mixture import keys_and_priors
from megakernel.model.layer import TransformerLayer
from megakernel.model.self_attention import SelfAttention

TOKENS, INPUTS, CHANNELS = 100, 64, 32
"""Maximum tokens, inputs and channels of a heat map: those of the paper. Further ones are left out."""


def measure_key_weights(subject: Subject) -> list[Row]:
    """layer, matrix (its head and key), input, channel, weight."""
    return [
        {"layer": layer.index, "matrix": name, "input": index, "channel": channel, "weight": weight}
        for layer in subject.model.modules()
        if isinstance(layer, TransformerLayer)
        for name, matrix in _by_name(key_weights(layer.self_attention))
        for index, channel, weight in _cells(matrix.T[:INPUTS, :CHANNELS])
    ]


def measure_keys(subject: Subject) -> list[Row]:
    """layer, matrix (its head and key), token, channel, value; of the first sample."""
    return [
        {"layer": layer, "matrix": name, "token": token, "channel": channel, "value": value}
        for _, layer, captured in subject.captured(samples=1)
        for name, matrix in _by_name(all_keys(captured))
        for token, channel, value in _cells(matrix[:TOKENS, :CHANNELS])
    ]


@torch.no_grad()
def key_weights(attention: SelfAttention) -> Tensor:
    """W_K (H_kv, M, d, C) of one layer, with low-rank updates; M keys per position if a mixture projects them."""
    _, of_keys, _ = attention.qkv.weight.unflatten(0, (attention.kv_heads, -1)).split(attention.rows, 1)
    if (update := attention.key_update) is not None:
        of_keys = of_keys + update.scale * (update.up @ update.down).view_as(of_keys)
    return of_keys.unflatten(1, (attention.keys_per_head, -1))


@torch.no_grad()
def all_keys(captured: CapturedAttention) -> Tensor:
    """The keys (H_kv, M, N, d) of the first sequence."""
    keys, _ = keys_and_priors(getattr(captured.core, "mixture", None), captured.inputs.k[:1])
    return keys[0] if keys.dim() == 5 else keys[0, :, None]


def _by_name(matrices: Tensor) -> Iterator[tuple[str, Tensor]]:
    for head, of_head in enumerate(matrices):
        for key, matrix in enumerate(of_head):
            yield f"head {head}" + (f", key {key}" if len(of_head) > 1 else ""), matrix


def _cells(matrix: Tensor) -> Iterator[tuple[int, int, float]]:
    for row, values in enumerate(matrix.tolist()):
        for column, value in enumerate(values):
            yield row, column, value
