"""What is known before any step: that the dense model is read right, what it predicts, and what the swap costs."""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.config import Attention, Config, Model, UserError
from megakernel.config.attention import Near
from megakernel.model import LanguageModel
from megakernel.parallel import Mesh
from megakernel.training.weight_source import WeightSource

from .ablations import as_sliding_window
from .handed_on import before_head
from .validation import Validation

IDENTITY_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""How far the loss of a student whose window covers the row may be from the dense model's, in nats."""

PARITY_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""How far logits may be from those of `transformers`, as a share of the largest."""

PARITY_TOKENS = 256


LONGEST_WINDOWED = 8192
"""Tokens per row up to which the sliding window is measured, which forms every pair of them."""


class Preflight(NamedTuple):
    """Losses in nats per token on the validation samples; pairs are of all tokens, and of those beyond the window."""

    parity: float | None
    """Largest difference to the logits of `transformers`, as a share of the largest.

    None of a run, and where rows are cut in pieces.
    """

    identity_loss: float | None
    """Of a student whose near window covers the row: the dense model again; None where rows are cut in pieces."""

    dense: tuple[float, float]
    """Of the dense model."""

    swapped: tuple[float, float]
    """Of the student before any step: the dense model's weights, mechanisms as drawn."""

    sliding: tuple[float, float] | None
    """Of the dense model through a sliding window with sinks; None where rows are too long or cut in pieces."""


def preflight(validation: Validation, source: WeightSource) -> Preflight:
    """Read the dense model, and compare what it predicts with `transformers`, the student and its identity.

    Raises UserError, alike on all ranks, where the dense model is not what `transformers` or the student make of it.
    """
    config, mesh = validation.config, validation.mesh
    window, length = near_window(config), config.training.evaluation_len
    whole = mesh.cp.size == 1
    model = validation.model(source.model(), source)
    dense = validation.losses(model, window)
    parity = _parity(model, source.folder, mesh) if whole and source.checkpoint is None else None
    sliding = None
    if whole and length <= LONGEST_WINDOWED:
        as_sliding_window(model, window)
        sliding = validation.losses(model, window)
    del model
    swapped = validation.losses(validation.model(config.model, source), window)
    identity_loss = None
    if whole:
        covered = _covered(config.model, source.model(), length)
        identity_loss, _ = validation.losses(validation.model(covered, source), window)
    found = Preflight(parity, identity_loss, dense, swapped, sliding)
    _check(found, config, source)
    return found


def near_window(config: Config) -> int:
    """Tokens of the largest near window of the configured layers; 0 where there is none."""
    attentions = (config.model.layer_attention(layer) for layer in range(config.model.num_layers))
    return max((_window(attention) for attention in attentions), default=0)


def _window(attention: Attention) -> int:
    if attention.near is None:
        return 0
    return (attention.block_size or 0) * attention.near.blocks


def _covered(model: Model, dense: Model, length: int) -> Model:
    """The same with windows of what the dense layers see, `length` tokens: nothing is left for what approximates."""
    pairs = (
        (model.layer_attention(layer), dense.layer_attention(layer)) for layer in range(model.num_layers)
    )
    attentions = [_covering(mine, length) if whole.window is None else whole for mine, whole in pairs]
    pattern = [attention.model_dump(mode="json") for attention in attentions]
    return Model.model_validate(model.model_dump(mode="json") | {"attention_pattern": pattern})


def _covering(attention: Attention, length: int) -> Attention:
    if attention.is_full_softmax:
        return attention
    if attention.near is None or attention.compression is None or attention.near.kind != "softmax":
        return Attention(similarity="softmax", near=Near(block_size=length))
    tree = attention.model_dump(mode="json")
    return Attention.model_validate(tree | {"compression": tree["compression"] | {"block_size": length}})


def _parity(dense: LanguageModel, folder: Path, mesh: Mesh) -> float:
    """How far the logits of one made row are from those of `transformers`; measured by one rank of the last stage."""
    model = dense.settings.model
    vocab = model.vocab_size or dense.settings.vocab_size
    length = min(PARITY_TOKENS, model.max_positions or PARITY_TOKENS)
    tokens = torch.arange(length, device=mesh.device).mul(7919).remainder(vocab)[None]
    positions = torch.arange(length, device=mesh.device)[None]
    difference = 0.0
    with torch.no_grad():
        entering = before_head(dense, (tokens, positions), mesh)
        if entering is not None:
            ours = dense.logits(entering[0])[..., :vocab]
            if mesh.rank == mesh.world_size - mesh.world_size // mesh.pp.size:
                theirs = _reference_logits(folder, tokens, ours.dtype)
                difference = float((ours - theirs).abs().max() / theirs.abs().max())
    return max(mesh.gather_objects(difference))


def _reference_logits(folder: Path, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(tokens.device).eval()
    logits: Tensor = reference(tokens).logits
    return logits


def _check(found: Preflight, config: Config, source: WeightSource) -> None:
    dtype = config.training.dtype
    if found.parity is not None and not found.parity <= PARITY_TOLERANCE[dtype]:
        raise UserError(
            f"{source.key}={source.folder}: logits differ from those of transformers by {found.parity:.1e} of the "
            f"largest, more than {PARITY_TOLERANCE[dtype]:.0e} in {dtype}; its config.json asks for something that "
            "Megakernel does not know: take training.dtype=float32 to see whether it is rounding"
        )
    dense_loss, swapped_loss = found.dense[0], found.swapped[0]
    identity = dense_loss if found.identity_loss is None else found.identity_loss
    if not abs(identity - dense_loss) <= IDENTITY_TOLERANCE[dtype]:
        raise UserError(
            f"model: with windows as long as the row it loses {identity:.4f} and the dense model "
            f"{dense_loss:.4f}; give it the dense model's section, see `megakernel import {source.folder}`"
        )
    if not math.isfinite(swapped_loss):
        raise UserError(
            f"model.attention: its loss is {swapped_loss} before any step; take feature_map: hedgehog"
        )
