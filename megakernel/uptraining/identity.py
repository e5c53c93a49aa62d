"""What is known before any step: that the dense model is read right, what it predicts, and what the swap costs."""

import math
from typing import Any, NamedTuple

import torch

from megakernel.checkpoint.parity import Parity, parity
from megakernel.checkpoint.weight_source import WeightSource
from megakernel.config import Attention, Config, Model, UserError
from megakernel.config.attention import AROUND, Near
from megakernel.parallel import Mesh

from .ablations import as_sliding_window
from .validation import Validation

IDENTITY_TOKENS = 512
"""Tokens of each sequence that are compared at most.

A window forms every pair of its tokens, 1 MiB of float32 scores here for each head and sequence; the error that is
looked for (weights, biases, norms, rotary frequencies that the student takes otherwise) shows in few tokens as in many.
"""


class Identity(NamedTuple):
    """Nats per token on the first tokens of the validation sequences."""

    tokens: int
    """How many of each sequence."""

    student: float
    """Of the student with windows over all of them."""

    dense: float
    """Of the dense model."""


def identity_tokens(dense: Model, student: Model, length: int, mesh: Mesh) -> int:
    """Tokens at the beginning of sequences of `length` that every layer of both models sees whole; 0 for none.

    Behind a layer's own window the two need not be the same, and a model that approximates, or drops the cap of a dense
    layer's exponents, is none to be. With sequence parallelism ranks take equal parts.
    """
    whole, own = dense.attentions, student.attentions
    if not all(attention.is_full_softmax and attention.mixture is None for attention in whole):
        return 0
    # A window knows no cap of exponents: without the dense layer's no length makes the two the same.
    if any(theirs.softcap not in (None, mine.softcap) for theirs, mine in zip(whole, own)):
        return 0
    attentions = (*whole, *own)
    windows = [attention.window for attention in attentions if attention.window is not None]
    tokens = min(IDENTITY_TOKENS, length, *windows)
    return tokens - tokens % mesh.tp.size if mesh.sequence_parallel else tokens


def covering(student: Model, dense: Model, tokens: int) -> Model:
    """The same with windows of `tokens` at least in every layer that approximates: nothing is left to approximate.

    Around its attention a layer has what the dense model's has.
    """
    layers = [
        _covering(mine, tokens).model_copy(update={part: getattr(theirs, part) for part in AROUND})
        for mine, theirs in zip(student.attentions, dense.attentions)
    ]
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


IDENTITY_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""How far the loss of a student whose windows cover the tokens may be from the dense model's, in nats."""

LONGEST_WINDOWED = 8192
"""Tokens per sequence up to which the sliding window is measured, which forms every pair of them."""


class Preflight(NamedTuple):
    """Losses in nats per token on the validation samples; pairs are of all tokens, and of those beyond the window."""

    parity: Parity
    """Of logits, with `transformers`, both in float32."""

    identity: Identity | None
    """Of a student whose near windows cover the tokens: the dense model again.

    None where sequences are cut in shards, none of those tokens counts (data.scored: answers), or a dense layer's
    softcap is dropped.
    """

    dense: tuple[float, float]
    """Of the dense model."""

    swapped: tuple[float, float]
    """Of the student before any step: the dense model's weights, mechanisms as drawn."""

    sliding: tuple[float, float] | None
    """Of the dense model through a sliding window as long as the near one, with sinks.

    None where there is no near window, or sequences are too long or cut in shards.
    """

    @classmethod
    def read(cls, tree: dict[str, Any]) -> "Preflight":
        """What `_asdict` became in JSON."""
        same = tree["identity"]
        identity = None if same is None else Identity(*same)
        return cls(**tree | {"parity": Parity(*tree["parity"]), "identity": identity})


def preflight(validation: Validation, source: WeightSource, student: Model) -> Preflight:
    """Read the dense model, and compare what it predicts with `transformers`, the student and its identity.

    student: the wanted model, with the layers that stay softmax as far as they are known.
    Raises UserError, alike on all ranks, where the dense model is not what `transformers` or the student make of it.
    """
    config, mesh = validation.config, validation.mesh
    window, length = near_window(config), config.training.evaluation_len
    whole = mesh.cp.size == 1
    same_logits = parity(lambda: validation.model(source.model(), source, torch.float32), source, mesh)
    model = validation.model(source.model(), source)
    dense = validation.losses(model, window)
    tokens = identity_tokens(source.model(), student, length, mesh) if whole else 0
    dense_start = validation.losses(model, window, tokens)[0] if tokens else 0.0
    sliding = None
    if whole and window and length <= LONGEST_WINDOWED:
        as_sliding_window(model, window)
        sliding = validation.losses(model, window)
    del model
    swapped = validation.losses(validation.model(student, source), window)
    identity = None
    if dense_start != 0:  # as it is where no label of these tokens counts
        covered = validation.model(covering(student, source.model(), tokens), source)
        identity = Identity(tokens, validation.losses(covered, window, tokens)[0], dense_start)
    found = Preflight(same_logits, identity, dense, swapped, sliding)
    check(found, config, source)
    return found


def near_window(config: Config) -> int:
    """Tokens of the largest near window of the configured layers; 0 where there is none."""
    layers = config.model.attentions
    windows = ((layer.block_size or 0) * layer.near.blocks for layer in layers if layer.near is not None)
    return max(windows, default=0)


def check(found: Preflight, config: Config, source: WeightSource) -> None:
    """Raise UserError for a dense model, or a student, with which no step is worth its time."""
    dtype = config.training.dtype
    found.parity.check(f"{source.key}={source.folder}")
    if not math.isfinite(found.dense[0]):
        raise UserError(
            f"{source.key}={source.folder}: its loss is {found.dense[0]}; {dtype} cannot hold what it computes: take "
            "training.dtype=float32"
        )
    same = found.identity
    if same is not None and not abs(same.student - same.dense) <= IDENTITY_TOLERANCE[dtype]:
        raise UserError(
            f"model: with windows over the first {same.tokens} tokens of each sequence its loss is {same.student:.4f} "
            f"and that of the dense model {same.dense:.4f}; give it the dense model's section"
            f"{_differences(config.model, source.model())}, see `megakernel import {source.folder}`"
        )
    if not math.isfinite(found.swapped[0]):
        raise UserError(
            f"model.attention: its loss is {found.swapped[0]} before any step; take feature_map: hedgehog"
        )


def _differences(student: Model, dense: Model) -> str:
    keys = [
        key for key in Model.model_fields if key not in _OWN and getattr(student, key) != getattr(dense, key)
    ]
    return f" ({', '.join(f'model.{key}={getattr(dense, key)}' for key in keys)})" if keys else ""


_OWN = (
    *("attention", "attention_pattern", "max_positions", "known_seq_len", "vocab_multiple", "init_std"),
    "family",
)
"""Keys in which a student is not its dense model, or need not be."""
