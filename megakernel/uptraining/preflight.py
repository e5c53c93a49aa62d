"""What is known before any step: that the dense model is read right, what it predicts, and what the swap costs."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megakernel.config import Attention, Config, Model, UserError
from megakernel.config.attention import Near
from megakernel.model import LanguageModel
from megakernel.parallel import Mesh
from megakernel.training.weight_source import WeightSource

from .validation import Validation

IDENTITY_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""How far the loss of a student whose window covers the row may be from the dense model's, in nats."""

PARITY_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""How far logits may be from those of `transformers`, as a share of the largest."""

PARITY_TOKENS = 256


@dataclass(frozen=True)
class Preflight:
    """Losses in nats per token on the validation samples."""

    dense_loss: float
    """Of the dense model."""

    swapped_loss: float
    """Of the student before any step: the dense model's weights, mechanisms as drawn."""

    identity_loss: float | None
    """Of a student whose near window covers the row: the dense model again; None where rows are cut in pieces."""

    parity: float | None
    """Largest difference to the logits of `transformers`, as a share of the largest.

    None of a run, and where rows are cut in pieces.
    """

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def preflight(validation: Validation, source: WeightSource) -> Preflight:
    """Read the dense model, and compare what it predicts with `transformers`, the student and its identity.

    Raises UserError, alike on all ranks, where the dense model is not what `transformers` or the student make of it.
    """
    config, mesh = validation.config, validation.mesh
    dense = validation.model(source.model(), source)
    dense_loss = validation.loss(dense)
    whole = mesh.cp.size == 1
    parity = _parity(dense, source.folder, mesh) if whole and source.checkpoint is None else None
    del dense
    swapped_loss = validation.loss(validation.model(config.model, source))
    identity_loss = None
    if whole:
        covered = _covered(config.model, config.training.evaluation_len)
        identity_loss = validation.loss(validation.model(covered, source))
    found = Preflight(dense_loss, swapped_loss, identity_loss, parity)
    _check(found, config, source)
    return found


def _covered(model: Model, length: int) -> Model:
    """The same with near windows of `length` tokens: nothing is left for what approximates."""
    attentions = [_covering(model.layer_attention(layer), length) for layer in range(model.num_layers)]
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
    """How far the logits of one made row are from those of `transformers`, the largest over ranks."""
    from transformers import AutoModelForCausalLM

    model = dense.settings.model
    vocab = model.vocab_size or dense.settings.vocab_size
    length = min(PARITY_TOKENS, model.max_positions or PARITY_TOKENS)
    tokens = torch.arange(length, device=mesh.device).mul(7919).remainder(vocab)[None]
    positions = torch.arange(length, device=mesh.device)[None]
    with torch.no_grad():
        ours = dense.logits(dense.hidden(tokens, positions))
        theirs = torch.zeros_like(ours)
        if mesh.rank == 0:
            reference = AutoModelForCausalLM.from_pretrained(folder, dtype=ours.dtype).to(mesh.device).eval()
            theirs[..., :vocab] = reference(tokens).logits
    difference = 0.0
    if mesh.rank == 0:
        real = ours[..., :vocab] - theirs[..., :vocab]
        difference = float(real.abs().max() / theirs.abs().max())
    return max(mesh.gather_objects(difference))


def _check(found: Preflight, config: Config, source: WeightSource) -> None:
    dtype = config.training.dtype
    if found.parity is not None and not found.parity <= PARITY_TOLERANCE[dtype]:
        raise UserError(
            f"{source.key}={source.folder}: logits differ from those of transformers by {found.parity:.1e} of the "
            f"largest, more than {PARITY_TOLERANCE[dtype]:.0e} in {dtype}; its config.json asks for something that "
            "Megakernel does not know: take training.dtype=float32 to see whether it is rounding"
        )
    identity = found.dense_loss if found.identity_loss is None else found.identity_loss
    if not abs(identity - found.dense_loss) <= IDENTITY_TOLERANCE[dtype]:
        raise UserError(
            f"model: with windows as long as the row it loses {identity:.4f} and the dense model "
            f"{found.dense_loss:.4f}; give it the dense model's section, see `megakernel import {source.folder}`"
        )
    if not math.isfinite(found.swapped_loss):
        raise UserError(
            f"model.attention: its loss is {found.swapped_loss} before any step; take feature_map: hedgehog"
        )
