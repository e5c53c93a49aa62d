"""Parity check: the dense model's logits compared with those that `transformers` computes from the same folder.

In float32, because in bfloat16 another order of summation changes logits as much as a misread model does.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megakernel.config import Model, UserError
from megakernel.model import LanguageModel, ModelSettings, set_rotary
from megakernel.model.layer import TransformerLayer
from megakernel.parallel import OneProcess
from megakernel.parallel.device import free_memory, is_out_of_memory
from megakernel.parallel.ranks import Ranks

from .dense import DenseCheckpoint
from .dense.checkpoint import hf_config
from .dense.own import OWN
from .weight_source import WeightSource
from .whole_tensors import WEIGHT

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from megakernel.parallel import Mesh

PARITY_TOKENS = 256

SHORT_WINDOW = 16
"""Sliding windows of a partial model are reduced to this, so that the compared tokens extend beyond them."""

PARITY_TOLERANCE = 1e-4
"""Largest allowed difference from the logits of `transformers` in float32, as a share of the largest logit."""

MEMORY_SHARE = 0.5
"""Share of the free memory that one of the two models may take; they are loaded one after the other."""


class Parity(NamedTuple):
    """The measured difference, or the reason why it was not measured."""

    difference: float | None
    """Largest difference of a logit, as a share of the largest logit; None if not measured."""

    reason: str = ""
    """Why it was not measured, or not for all layers."""

    def __str__(self) -> str:
        if self.difference is None:
            return f"logits are not compared with those of transformers: {self.reason}"
        part = f", {self.reason}" if self.reason else ""
        return f"logits are those of transformers, at most {self.difference:.1e} of the largest apart (float32{part})"

    def check(self, label: str) -> None:
        """Raise UserError if the difference is too large. label: the folder's name in the message."""
        if self.difference is None or self.difference <= PARITY_TOLERANCE:
            return
        if math.isnan(self.difference):
            raise UserError(
                f"{label}: its logits are not finite in float32, because a weight is not finite; download it again"
            )
        raise UserError(
            f"{label}: logits differ from those of transformers by {self.difference:.1e} of the largest, more than "
            f"{PARITY_TOLERANCE:.0e} in float32; its config.json asks for something that Megakernel does not support: "
            "remove the keys that models of its family do not have, or save it again with `save_pretrained`"
        )


def parity(dense: Callable[[], LanguageModel], source: WeightSource, mesh: "Mesh") -> Parity:
    """Compare the logits of one synthetic sequence; called on all ranks, which get the same result.

    dense: builds the model of `source` in float32, with `frozen_model`. One rank of the last stage has all its logits
    and loads the reference. If the model is too large for that, or with context parallelism, that rank alone compares
    as many layers as fit. Raises UserError, alike on all ranks, if `transformers` cannot compute the logits.
    """
    if source.checkpoint is not None:
        return Parity(None, "the dense model is a run of this project")
    reference_rank = mesh.world_size - mesh.world_size // mesh.pp.size
    label = f"{source.key}={source.folder}"

    def is_partly_read() -> bool:
        checkpoint = DenseCheckpoint(source.folder)
        return checkpoint.config["model_type"] == OWN or bool(why_too_large(checkpoint, _free(mesh.device)))

    is_part = mesh.cp.size > 1 or any(mesh.gather_objects(Ranks.of(mesh).each(is_partly_read)))
    ours = None if is_part else _logits_of_all_ranks(dense(), mesh)

    def measure() -> Parity | None:
        if mesh.rank != reference_rank:
            return None
        if ours is None:
            return folder_parity(DenseCheckpoint(source.folder), label, mesh.device)
        return compare_logits(ours, label, source.folder)

    result = mesh.gather_objects(Ranks.of(mesh).each(measure))[reference_rank]
    assert result is not None
    return result


def folder_parity(checkpoint: DenseCheckpoint, label: str, device: torch.device) -> Parity:
    """Compare in this process; if the model does not fit into memory, only as many of the first layers as fit.

    Sliding windows are reduced to SHORT_WINDOW in both. Raises UserError if `transformers` cannot compute it.
    """
    if checkpoint.config["model_type"] == OWN:
        return Parity(None, "transformers has the dense model's class only from Megakernel")
    try:
        distances, layers = _distances(checkpoint, label, device)
    except MemoryError as error:
        return Parity(None, str(error) or "memory ran out")
    num_layers = checkpoint.model.num_layers
    return Parity(distances["logits"], "" if layers == num_layers else f"{layers} of {num_layers} layers")


def layer_distances(checkpoint: DenseCheckpoint, label: str, device: torch.device) -> dict[str, float]:
    """Largest differences of hidden states from those of `transformers` in float32, as shares of the largest value.

    By place: the embedding, each layer's output, the last layer's after the final norm, and the logits. Computed in
    this process; if the model does not fit into memory, for as many of the first layers as fit. Raises UserError if
    none fits, or `transformers` cannot compute it.
    """
    if checkpoint.config["model_type"] == OWN:
        raise UserError(
            f"{label}: transformers has the model's class only from Megakernel; check the dense model"
        )
    try:
        return _distances(checkpoint, label, device)[0]
    except MemoryError as error:
        raise UserError(f"{label}: {error}; check it on a larger machine") from None


@torch.no_grad()
def _distances(checkpoint: DenseCheckpoint, label: str, device: torch.device) -> tuple[dict[str, float], int]:
    """The result of `layer_distances`, and the number of layers. Raises MemoryError, with a reason, if none fits."""
    layers = _fitting_layers(checkpoint, device)
    if layers < 1:
        raise MemoryError(why_too_large(checkpoint, _free(device)))
    part, config = _first_layers(checkpoint, layers)
    model, tokens = _model(part, device)
    ours: list[Tensor] = []
    for layer in model.modules():
        if isinstance(layer, TransformerLayer):
            layer.register_forward_pre_hook(lambda _, inputs: ours.append(inputs[0][0].transpose(0, 1)))
    hidden = model.hidden(tokens, torch.arange(tokens.shape[1], device=device)[None])
    ours += [hidden.transpose(0, 1), model.logits(hidden)]
    del model, layer  # frees memory for the reference
    output = _reference(checkpoint.folder, config, tokens, label, output_hidden_states=True)
    outputs = [f"layer {layer}" for layer in range(layers - 1)]
    places = ["embedding", *outputs, f"layer {layers - 1} and norm", "logits"]
    theirs = [*output.hidden_states, output.logits]
    return {place: _difference(x, y) for place, x, y in zip(places, ours, theirs, strict=True)}, layers


def _difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def _fitting_layers(checkpoint: DenseCheckpoint, device: torch.device) -> int:
    """How many of the first layers fit into memory; 0 if not even one does."""
    layers, free = checkpoint.model.num_layers, _free(device)
    if not why_too_large(checkpoint, free):
        return layers
    smallest = weight_bytes(_first_layers(checkpoint, 1)[0])
    for_each = (weight_bytes(checkpoint) - smallest) // max(layers - 1, 1)
    fitting = int((MEMORY_SHARE * free - smallest) // for_each) + 1 if layers > 1 else 0
    return min(max(fitting, 0), layers - 1)


def compare_logits(ours: Tensor, label: str, folder: Path) -> Parity:
    """Compare logits (1, N, V) of `synthetic_tokens` with those that `transformers` computes from a folder.

    Raises UserError if `transformers` fails for another reason than memory.
    """
    _, length, vocab_size = ours.shape
    tokens = synthetic_tokens(length, vocab_size, ours.device)
    try:
        return Parity(_difference(ours, _reference(folder, None, tokens, label).logits))
    except MemoryError as error:
        return Parity(None, str(error))


def synthetic_tokens(length: int, vocab_size: int, device: torch.device) -> Tensor:
    """Token ids (1, length) spread over the vocabulary."""
    return torch.arange(length, device=device).mul(7919).remainder(vocab_size)[None]


def why_too_large(checkpoint: DenseCheckpoint, free: int) -> str:
    """Why `free` bytes of memory do not suffice to compare all layers; empty if they do."""
    if (needed := weight_bytes(checkpoint)) <= MEMORY_SHARE * free:
        return ""
    return (
        f"transformers would need {needed / 2**30:.1f} GiB on one process, which may use {MEMORY_SHARE:.0%} of its "
        f"{free / 2**30:.1f} GiB of free memory"
    )


def weight_bytes(checkpoint: DenseCheckpoint) -> int:
    """Bytes of its weights in float32."""
    return 4 * sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names)


def _free(device: torch.device) -> int:
    """The smaller free memory of host and device: models are loaded to the one and moved to the other."""
    return min(map(free_memory, (torch.device("cpu"), device)))


def _first_layers(checkpoint: DenseCheckpoint, layers: int) -> tuple[DenseCheckpoint, "PreTrainedConfig"]:
    """The first layers as a checkpoint and its configuration, with short windows."""
    config = hf_config(checkpoint.folder)
    config.num_hidden_layers = layers
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = kinds[:layers]
    if window := getattr(config, "sliding_window", None):
        config.sliding_window = min(window, SHORT_WINDOW)
    return DenseCheckpoint(checkpoint.folder, config=config.to_dict()), config


def _model(checkpoint: DenseCheckpoint, device: torch.device) -> tuple[LanguageModel, Tensor]:
    """Build the model in float32, and `synthetic_tokens` for it."""
    assert checkpoint.model.vocab_size is not None
    plain = checkpoint.model.model_copy(update={"vocab_multiple": 1})
    plain = plain.for_seq_len(_length(plain))
    with torch.device("meta"):
        model = LanguageModel(ModelSettings(plain, checkpoint.model.vocab_size, OneProcess())).eval()
    weights = {name: checkpoint.read(name)[WEIGHT].float() for name in checkpoint.names}
    # Not strict, because Megatron-core's layers have extra state without weights.
    model.load_state_dict(weights, assign=True, strict=False)
    model.to(device)
    return model, synthetic_tokens(_length(plain), checkpoint.model.vocab_size, device)


@torch.no_grad()
def _logits_of_all_ranks(model: LanguageModel, mesh: "Mesh") -> Tensor:
    """Logits (1, N, V) of `synthetic_tokens` on the ranks of the last stage, which gather them; empty on all others."""
    from .frozen import head_inputs  # loads DeepSpeed, which `megakernel import` does without

    settings = model.settings
    set_rotary(model, settings.model.for_seq_len(_length(settings.model)))
    tokens = synthetic_tokens(_length(settings.model), settings.vocab_size, mesh.device)
    entering = head_inputs(model, (tokens, torch.arange(tokens.shape[1], device=mesh.device)[None]), mesh)
    return torch.empty(0) if entering is None else model.logits(entering[0])


def _length(model: Model) -> int:
    return min(PARITY_TOKENS, model.max_positions or PARITY_TOKENS)


@torch.no_grad()
def _reference(
    folder: Path, config: "PreTrainedConfig | None", tokens: Tensor, label: str, **options: bool
) -> Any:
    """Output of `transformers` for a folder, called with `options`; config: replaces its config.json.

    Raises MemoryError if memory runs out, UserError if it fails for another reason.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # local weights load quickly
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # a partial model leaves weights unused, which it would warn of
    try:
        replacement = {} if config is None else {"config": config}
        reference = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True, **replacement
        )
        reference.config.return_dict = True
        output = reference.to(tokens.device).eval()(tokens, **options)
    # Configurations of any kind can fail in any way, such as by importing missing libraries.
    except Exception as error:
        text = " ".join(str(error).split())
        if is_out_of_memory(error):
            # It needed more than its weights, or other processes took memory meanwhile.
            raise MemoryError(f"transformers ran out of memory ({text})") from None
        raise UserError(
            f"{label}: transformers cannot compute its logits ({type(error).__name__}: {text}); "
            "repair the folder until AutoModelForCausalLM.from_pretrained loads it"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    return output
