"""How far the dense model's logits are from those that `transformers` computes of the same folder."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.config import UserError
from megakernel.model import LanguageModel
from megakernel.parallel import Mesh
from megakernel.parallel.device import free_memory, is_out_of_memory
from megakernel.training.ranks import Ranks
from megakernel.training.weight_source import WeightSource

from .dense import DenseCheckpoint
from .dense.families import OWN
from .handed_on import before_head

PARITY_TOKENS = 256

LARGEST_SHARE = 0.5
"""Of the memory that is free: what the reference may take, which one process holds whole beside what it has."""


class Parity(NamedTuple):
    """What was measured, or why it was not."""

    difference: float | None
    """Largest difference of a logit, as a share of the largest logit; None where it was not measured."""

    reason: str = ""
    """Why it was not."""


def parity(dense: LanguageModel, source: WeightSource, mesh: Mesh) -> Parity:
    """Compare the logits of one made row; called on all ranks, which get the same.

    dense: from `frozen_model`, of `source`. One rank of the last stage has all logits, and loads the reference.
    Raises UserError, alike on all ranks, where `transformers` cannot compute it.
    """
    if source.checkpoint is not None:
        return Parity(None, "the dense model is a run of this project")
    if mesh.cp.size > 1:
        return Parity(None, "rows are cut in pieces")
    measuring = mesh.world_size - mesh.world_size // mesh.pp.size
    dtype = next(dense.parameters()).dtype

    def obstacle() -> str:
        if mesh.rank != measuring:
            return ""
        checkpoint = DenseCheckpoint(source.folder)
        if checkpoint.config["model_type"] == OWN:
            return "transformers knows the dense model through Megakernel alone"
        # It is loaded to the host and moved to the device.
        return too_large(checkpoint, dtype, min(map(free_memory, (torch.device("cpu"), mesh.device))))

    reasons = mesh.gather_objects(Ranks.of(mesh).alike(obstacle))
    if reasons[measuring]:
        return Parity(None, reasons[measuring])
    model = dense.settings.model
    length = min(PARITY_TOKENS, model.max_positions or PARITY_TOKENS)
    tokens = torch.arange(length, device=mesh.device).mul(7919).remainder(dense.settings.vocab_size)[None]
    positions = torch.arange(length, device=mesh.device)[None]
    with torch.no_grad():
        entering = before_head(dense, (tokens, positions), mesh)
        # Of all ranks of the last stage, which gather them.
        ours = None if entering is None else dense.logits(entering[0])

    def measured() -> Parity | None:
        if mesh.rank != measuring:
            return None
        assert ours is not None
        return compared(ours, source, tokens)

    found = mesh.gather_objects(Ranks.of(mesh).alike(measured))[measuring]
    assert found is not None
    return found


def compared(ours: Tensor, source: WeightSource, tokens: Tensor) -> Parity:
    """Hold logits (1, N, V) of `tokens` (1, N) against those that `transformers` computes in their dtype.

    Raises UserError where it cannot, for another reason than memory.
    """
    try:
        theirs = _reference_logits(source, tokens, ours.dtype)
    except MemoryError as error:  # more than its weights, or memory that others took meanwhile
        return Parity(None, f"transformers ran out of memory ({error})")
    return Parity(float((ours - theirs).abs().max() / theirs.abs().max()))


def too_large(checkpoint: DenseCheckpoint, dtype: torch.dtype, free: int) -> str:
    """Why the reference is not loaded in `dtype` where `free` bytes are; empty where it can be."""
    size = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names) * dtype.itemsize
    if size <= LARGEST_SHARE * free:
        return ""
    return (
        f"transformers would need {size / 2**30:.1f} GiB on one process, and no more than {LARGEST_SHARE:.0%} of its "
        f"{free / 2**30:.1f} GiB of free memory are taken for that"
    )


@torch.no_grad()
def _reference_logits(source: WeightSource, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # of weights that lie on this machine
    try:
        reference = AutoModelForCausalLM.from_pretrained(
            source.folder, dtype=dtype, trust_remote_code=False, use_safetensors=True
        )
        reference = reference.to(tokens.device).eval()
        logits: Tensor = reference(tokens).logits
    # It reads configurations of any kind, with code of their own and libraries that need not be there.
    except Exception as error:
        text = " ".join(str(error).split())
        if is_out_of_memory(error):
            raise MemoryError(text) from None
        raise UserError(
            f"{source.key}={source.folder}: transformers cannot compute its logits ({type(error).__name__}: {text}); "
            "mend the folder until AutoModelForCausalLM.from_pretrained loads it"
        ) from error
    return logits
