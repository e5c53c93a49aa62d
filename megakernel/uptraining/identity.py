"""A student whose near windows cover the row is the dense model again: how it is made, and of which tokens."""

from typing import NamedTuple

from megakernel.config import Attention, Model
from megakernel.config.attention import Near
from megakernel.parallel import Mesh

IDENTITY_TOKENS = 512
"""Tokens of each row that are compared at most.

A window forms every pair of its tokens, 1 MiB of float32 scores here for each head and row; the error that is looked
for (weights, biases, norms, rotary frequencies that the student takes otherwise) shows in few tokens as in many.
"""


class Identity(NamedTuple):
    """Nats per token on the first tokens of the validation rows."""

    tokens: int
    """How many of each row."""

    student: float
    """Of the student with windows over all of them."""

    dense: float
    """Of the dense model."""


def identity_tokens(dense: Model, student: Model, length: int, mesh: Mesh) -> int:
    """Tokens at the beginning of rows of `length` that every layer of both models sees whole; 0 for none.

    Behind a layer's own window the two need not be the same, and a model that approximates is none to be. With
    sequence parallelism ranks take equal parts.
    """
    whole = [dense.layer_attention(layer) for layer in range(dense.num_layers)]
    if not all(attention.is_full_softmax and attention.mixture is None for attention in whole):
        return 0
    attentions = (*whole, *(student.layer_attention(layer) for layer in range(student.num_layers)))
    windows = [attention.window for attention in attentions if attention.window is not None]
    tokens = min(IDENTITY_TOKENS, length, *windows)
    return tokens - tokens % mesh.tp.size if mesh.sequence_parallel else tokens


def covering(student: Model, tokens: int) -> Model:
    """The same with windows of `tokens` at least in every layer that approximates: nothing is left to approximate."""
    layers = [_covering(student.layer_attention(layer), tokens) for layer in range(student.num_layers)]
    pattern = [attention.model_dump(mode="json") for attention in layers]
    return Model.model_validate(student.model_dump(mode="json") | {"attention_pattern": pattern})


def _covering(attention: Attention, tokens: int) -> Attention:
    if attention.is_full_softmax and attention.mixture is None:
        return attention
    if attention.near is None or attention.compression is None or attention.near.kind != "softmax":
        return Attention(similarity="softmax", near=Near(block_size=tokens))
    tree = attention.model_dump(mode="json")
    # A block that is longer already stays: its landmarks need not fit into a shorter one.
    block_size = max(tokens, attention.block_size or 0)
    return Attention.model_validate(tree | {"compression": tree["compression"] | {"block_size": block_size}})
