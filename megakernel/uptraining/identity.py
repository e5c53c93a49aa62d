"""Preflight of an up-training: checks that the dense model is read correctly, and losses before the first step."""

import math
from typing import Any, NamedTuple

import torch

from megakernel.checkpoint.parity import Parity, parity
from megakernel.checkpoint.weight_source import WeightSource
from megakernel.config import Attention, Config, Model, UserError
from megakernel.config.attention import OPTIONAL_PARTS, Near
from megakernel.parallel import Mesh

from .ablations import as_sliding_window
from .validation import Validation

IDENTITY_TOKENS = 512
"""Maximum number of tokens of each sequence to compare.

A window computes all pairs of its tokens, here 1 MiB of float32 scores for each head and sequence. Differences between
student and dense model in weights, biases, norms or rotary frequencies show in few tokens as well as in many.
"""


class Identity(NamedTuple):
    """Losses in nats per token on the first tokens of the validation sequences."""

    tokens: int
    """Number of tokens of each sequence."""

    student: float
    """Loss of the student with windows over all of these tokens."""

    dense: float
    """Loss of the dense model."""


def identity_tokens(dense: Model, student: Model, length: int, mesh: Mesh) -> int:
    """Number of first tokens of sequences of `length` on which the two models must be identical; 0 for none.

    Beyond a layer's own window they may differ. A dense model whose own attention is an approximation, and a student
    that drops a dense layer's softcap, are never identical. Sequence parallelism needs equal parts for all ranks.
    """
    dense_layers, student_layers = dense.attentions, student.attentions
    if not all(attention.is_plain_softmax for attention in dense_layers):
        return 0
    # A local window has no softcap: if the dense layer has one, no number of tokens makes the two identical.
    if any(old.softcap not in (None, new.softcap) for old, new in zip(dense_layers, student_layers)):
        return 0
    attentions = (*dense_layers, *student_layers)
    windows = [attention.window for attention in attentions if attention.window is not None]
    tokens = min(IDENTITY_TOKENS, length, *windows)
    return tokens - tokens % mesh.tp.size if mesh.sequence_parallel else tokens


def covering_model(student: Model, dense: Model, tokens: int) -> Model:
    """The student with exact windows of at least `tokens` tokens in every layer, so that nothing is approximated.

    Layers of an encoder, which have no windows, get full softmax. The parts around each layer's attention are the
    dense model's.
    """
    layers = [
        (_covering(layer, tokens) if student.is_causal else Attention()).model_copy(
            update={part: getattr(dense_layer, part) for part in OPTIONAL_PARTS}
        )
        for layer, dense_layer in zip(student.attentions, dense.attentions)
    ]
    pattern = [attention.model_dump(mode="json") for attention in layers]
    tree = student.model_dump(mode="json") | {"attention_pattern": pattern}
    # linformer's columns are no longer there.
    return Model.model_validate(tree if student.position == "learned" else tree | {"max_positions": None})


def _covering(attention: Attention, tokens: int) -> Attention:
    if attention.is_plain_softmax:
        return attention
    if attention.near is None or attention.compression is None or attention.near.kind != "softmax":
        return Attention(similarity="softmax", near=Near(block_size=tokens))
    tree = attention.model_dump(mode="json")
    # A longer block stays as it is, because its landmarks might not fit into a shorter one.
    block_size = max(tokens, attention.block_size or 0)
    compression = tree["compression"] | {"block_size": block_size}
    return Attention.model_validate(tree | {"compression": compression, "mixture": None})


IDENTITY_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""Largest allowed difference between the losses of the covering student and of the dense model, in nats."""

MAX_WINDOWED_LEN = 8192
"""Longest sequences for which the sliding window is measured, because it computes all pairs of tokens."""


class Preflight(NamedTuple):
    """Losses in nats per token on the validation samples, as pairs (all tokens, tokens beyond the local window)."""

    parity: Parity
    """Comparison of logits with `transformers`, in float32."""

    identity: Identity | None
    """Losses of the dense model and of a student whose windows cover the tokens, which should be equal.

    None with context parallelism, if none of those tokens counts (data.scored: answers), or if a dense layer's softcap
    is dropped.
    """

    dense: tuple[float, float]
    """Losses of the dense model."""

    swapped: tuple[float, float]
    """Losses of the student before any step: the dense model's weights, and mechanisms as initialized."""

    sliding: tuple[float, float] | None
    """Losses of the dense model with a sliding window as long as the local window, with sinks.

    None if there is no local window, if sequences are too long, or with context parallelism.
    """

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> "Preflight":
        """Rebuild it from the JSON of `_asdict`."""
        identity = None if tree["identity"] is None else Identity(*tree["identity"])
        return cls(**tree | {"parity": Parity(*tree["parity"]), "identity": identity})


def preflight(validation: Validation, source: WeightSource, student: Model) -> Preflight:
    """Load the dense model, and compare it with `transformers` and with the student.

    student: the model to train, with the layers that stay softmax if they are known.
    Raises UserError, alike on all ranks, if the dense model differs from `transformers` or from the covering student.
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
    if whole and window and length <= MAX_WINDOWED_LEN:
        as_sliding_window(model, window)
        sliding = validation.losses(model, window)
    del model
    swapped = validation.losses(validation.model(student, source), window)
    identity = None
    if dense_start != 0:  # it is 0 if no label of these tokens counts
        covered = validation.model(covering_model(student, source.model(), tokens), source)
        identity = Identity(tokens, validation.losses(covered, window, tokens)[0], dense_start)
    measured = Preflight(same_logits, identity, dense, swapped, sliding)
    check_preflight(measured, config, source)
    return measured


def near_window(config: Config) -> int:
    """Tokens of the largest local window of the configured layers; 0 if there is none."""
    layers = config.model.attentions
    windows = ((layer.block_size or 0) * layer.near.blocks for layer in layers if layer.near is not None)
    return max(windows, default=0)


def check_preflight(found: Preflight, config: Config, source: WeightSource) -> None:
    """Raise UserError for a dense model, or a student, that is not worth training."""
    dtype = config.training.dtype
    found.parity.check(f"{source.key}={source.folder}")
    if not math.isfinite(found.dense[0]):
        raise UserError(
            f"{source.key}={source.folder}: its loss is {found.dense[0]} in {dtype}; set training.dtype=float32"
        )
    identity = found.identity
    if identity is not None and not abs(identity.student - identity.dense) <= IDENTITY_TOLERANCE[dtype]:
        raise UserError(
            f"model: with windows over the first {identity.tokens} tokens of each sequence its loss is "
            f"{identity.student:.4f} and that of the dense model {identity.dense:.4f}; give it the dense model's "
            f"section{_differences(config.model, source.model())}, see `megakernel import {source.folder}`"
        )
    if not math.isfinite(found.swapped[0]):
        raise UserError(
            f"model.attention: its loss is {found.swapped[0]} before any step; take feature_map: hedgehog"
        )


def _differences(student: Model, dense: Model) -> str:
    keys = [
        key for key in Model.model_fields if key not in _FREE and getattr(student, key) != getattr(dense, key)
    ]
    return f" ({', '.join(f'model.{key}={getattr(dense, key)}' for key in keys)})" if keys else ""


_FREE = (
    *("attention", "attention_pattern", "max_positions", "vocab_multiple", "init_std"),
    *("init", "embedding_init_std"),
    "imported",
)
"""Keys in which a student may differ from its dense model."""
