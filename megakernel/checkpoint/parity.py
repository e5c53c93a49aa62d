"""How far the dense model's logits are from those that `transformers` computes of the same folder, in float32.

In bfloat16 `transformers` is as far from itself, with another order of the same sums, as from a model read wrong.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megakernel.config import Model, UserError
from megakernel.model import LanguageModel, ModelSettings, rotate_by
from megakernel.model.layer import TransformerLayer
from megakernel.parallel import Mesh, OneProcess
from megakernel.parallel.device import free_memory, is_out_of_memory
from megakernel.parallel.ranks import Ranks

from .dense import DenseCheckpoint
from .dense.checkpoint import their_config
from .dense.families import OWN
from .frozen import before_head
from .weight_source import WeightSource

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PARITY_TOKENS = 256

SHORT_WINDOW = 16
"""Tokens to which a part's sliding windows are cut, so that the tokens compared reach beyond them."""

PARITY_TOLERANCE = 1e-4
"""How far logits may be from those of `transformers` in float32, as a share of the largest."""

LARGEST_SHARE = 0.5
"""Of the memory that is free: what one of the two models may take, which are compared one after the other."""


class Parity(NamedTuple):
    """What was measured, or why it was not."""

    difference: float | None
    """Largest difference of a logit, as a share of the largest logit; None where it was not measured."""

    reason: str = ""
    """Why it was not, or not of all layers."""

    def __str__(self) -> str:
        if self.difference is None:
            return f"logits are not compared with those of transformers: {self.reason}"
        part = f", {self.reason}" if self.reason else ""
        return f"logits are those of transformers, at most {self.difference:.1e} of the largest apart (float32{part})"

    def check(self, named: str) -> None:
        """Raise UserError, which names the folder so, where the model is not what `transformers` makes of it."""
        if self.difference is None or self.difference <= PARITY_TOLERANCE:
            return
        if math.isnan(self.difference):
            raise UserError(
                f"{named}: its logits are not finite in float32; a weight is not: download it again"
            )
        raise UserError(
            f"{named}: logits differ from those of transformers by {self.difference:.1e} of the largest, more than "
            f"{PARITY_TOLERANCE:.0e} in float32; its config.json asks for something that Megakernel does not know: "
            "remove the keys that models of its family do not have, or save it again with `save_pretrained`"
        )


def parity(dense: Callable[[], LanguageModel], source: WeightSource, mesh: Mesh) -> Parity:
    """Compare the logits of one made sequence; called on all ranks, which get the same.

    dense: makes the model of `source` in float32, from `frozen_model`. One rank of the last stage has all its logits,
    and loads the reference. Where the model is too large for that, or sequences are cut in shards, that rank alone
    compares as many layers as fit. Raises UserError, alike on all ranks, where `transformers` cannot compute it.
    """
    if source.checkpoint is not None:
        return Parity(None, "the dense model is a run of this project")
    measuring = mesh.world_size - mesh.world_size // mesh.pp.size
    named = f"{source.key}={source.folder}"

    def is_partly_read() -> bool:
        checkpoint = DenseCheckpoint(source.folder)
        return checkpoint.config["model_type"] == OWN or bool(too_large(checkpoint, _free(mesh.device)))

    is_part = mesh.cp.size > 1 or any(mesh.gather_objects(Ranks.of(mesh).alike(is_partly_read)))
    ours = None if is_part else _logits_of_all_ranks(dense(), mesh)

    def measured() -> Parity | None:
        if mesh.rank != measuring:
            return None
        if ours is None:
            return of_folder(DenseCheckpoint(source.folder), named, mesh.device)
        return compared(ours, named, source.folder)

    found = mesh.gather_objects(Ranks.of(mesh).alike(measured))[measuring]
    assert found is not None
    return found


def of_folder(checkpoint: DenseCheckpoint, named: str, device: torch.device) -> Parity:
    """Compare in this process alone; of a model that memory does not hold, the first layers that it does.

    Sliding windows are cut to SHORT_WINDOW in both. Raises UserError where `transformers` cannot compute it.
    """
    if checkpoint.config["model_type"] == OWN:
        return Parity(None, "transformers knows the dense model through Megakernel alone")
    try:
        distances, layers = _distances(checkpoint, named, device)
    except MemoryError as error:
        return Parity(None, str(error) or "memory ran out")
    every = checkpoint.model.num_layers
    return Parity(distances["logits"], "" if layers == every else f"{layers} of {every} layers")


def layer_distances(checkpoint: DenseCheckpoint, named: str, device: torch.device) -> dict[str, float]:
    """How far hidden states are from those of `transformers` in float32, as shares of the largest number there.

    By place: what the first layer reads, each layer's output, the last one's behind the norm before the head, and the
    logits. In this process alone; of a model that memory does not hold, of the first layers that it does. Raises
    UserError where none fits, or `transformers` cannot compute it.
    """
    if checkpoint.config["model_type"] == OWN:
        raise UserError(
            f"{named}: transformers knows the model through Megakernel alone; check the dense model"
        )
    try:
        return _distances(checkpoint, named, device)[0]
    except MemoryError as error:
        raise UserError(f"{named}: {error}; check it on a larger machine") from None


@torch.no_grad()
def _distances(checkpoint: DenseCheckpoint, named: str, device: torch.device) -> tuple[dict[str, float], int]:
    """Those of `layer_distances`, and of how many layers. Raises MemoryError, with a reason, where none fits."""
    layers = _fitting_layers(checkpoint, device)
    if layers < 1:
        raise MemoryError(too_large(checkpoint, _free(device)))
    part, config = _part(checkpoint, layers)
    model, tokens = _model(part, device)
    ours: list[Tensor] = []
    for layer in model.modules():
        if isinstance(layer, TransformerLayer):
            layer.register_forward_pre_hook(lambda _, inputs: ours.append(inputs[0][0].transpose(0, 1)))
    hidden = model.hidden(tokens, torch.arange(tokens.shape[1], device=device)[None])
    ours += [hidden.transpose(0, 1), model.logits(hidden)]
    del model, layer  # the reference has their memory
    output = _reference(checkpoint.folder, config, tokens, named, output_hidden_states=True)
    behind = [f"layer {layer}" for layer in range(layers - 1)]
    places = ["embedding", *behind, f"layer {layers - 1} and norm", "logits"]
    theirs = [*output.hidden_states, output.logits]
    return {place: _distance(x, y) for place, x, y in zip(places, ours, theirs, strict=True)}, layers


def _distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def _fitting_layers(checkpoint: DenseCheckpoint, device: torch.device) -> int:
    """How many of the first layers memory holds beside nothing else, all or fewer; 0 where not even one."""
    layers, free = checkpoint.model.num_layers, _free(device)
    if not too_large(checkpoint, free):
        return layers
    smallest = size(_part(checkpoint, 1)[0])
    for_each = (size(checkpoint) - smallest) // max(layers - 1, 1)
    fitting = int((LARGEST_SHARE * free - smallest) // for_each) + 1 if layers > 1 else 0
    return min(max(fitting, 0), layers - 1)


def compared(ours: Tensor, named: str, folder: Path) -> Parity:
    """Hold logits (1, N, V) of `made_tokens` against those that `transformers` computes of a folder.

    Raises UserError where it cannot, for another reason than memory.
    """
    _, length, vocab_size = ours.shape
    tokens = made_tokens(length, vocab_size, ours.device)
    try:
        return Parity(_distance(ours, _reference(folder, None, tokens, named).logits))
    except MemoryError as error:
        return Parity(None, str(error))


def made_tokens(length: int, vocab_size: int, device: torch.device) -> Tensor:
    """(1, length) of ids all over a vocabulary."""
    return torch.arange(length, device=device).mul(7919).remainder(vocab_size)[None]


def too_large(checkpoint: DenseCheckpoint, free: int) -> str:
    """Why not all layers are compared where `free` bytes are; empty where they are."""
    if (needed := size(checkpoint)) <= LARGEST_SHARE * free:
        return ""
    return (
        f"transformers would need {needed / 2**30:.1f} GiB on one process, and no more than {LARGEST_SHARE:.0%} of its "
        f"{free / 2**30:.1f} GiB of free memory are taken for that"
    )


def size(checkpoint: DenseCheckpoint) -> int:
    """Bytes of its weights in float32."""
    return 4 * sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names)


def _free(device: torch.device) -> int:
    """Of the host and of the device: models are loaded to one and moved to the other."""
    return min(map(free_memory, (torch.device("cpu"), device)))


def _part(checkpoint: DenseCheckpoint, layers: int) -> tuple[DenseCheckpoint, "PreTrainedConfig"]:
    """The first layers, with short windows."""
    config = their_config(checkpoint.folder)
    config.num_hidden_layers = layers
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = kinds[:layers]
    if window := getattr(config, "sliding_window", None):
        config.sliding_window = min(window, SHORT_WINDOW)
    return DenseCheckpoint(checkpoint.folder, config=config.to_dict()), config


def _model(checkpoint: DenseCheckpoint, device: torch.device) -> tuple[LanguageModel, Tensor]:
    """The model in float32, and `made_tokens` for it."""
    assert checkpoint.model.vocab_size is not None
    plain = checkpoint.model.model_copy(update={"vocab_multiple": 1})
    plain = plain.for_rows(_length(plain))
    with torch.device("meta"):
        model = LanguageModel(ModelSettings(plain, checkpoint.model.vocab_size, OneProcess())).eval()
    weights = {name: checkpoint.read(name)["fp32"].float() for name in checkpoint.names}
    model.load_state_dict(
        weights, assign=True, strict=False
    )  # Megatron-core's layers have entries of no weights
    model.to(device)
    return model, made_tokens(_length(plain), checkpoint.model.vocab_size, device)


@torch.no_grad()
def _logits_of_all_ranks(model: LanguageModel, mesh: Mesh) -> Tensor:
    """Logits (1, N, V) of `made_tokens` on the ranks of the last stage, which gather them; empty on all others."""
    settings = model.settings
    rotate_by(model, settings.model.for_rows(_length(settings.model)))
    tokens = made_tokens(_length(settings.model), settings.vocab_size, mesh.device)
    entering = before_head(model, (tokens, torch.arange(tokens.shape[1], device=mesh.device)[None]), mesh)
    return torch.empty(0) if entering is None else model.logits(entering[0])


def _length(model: Model) -> int:
    return min(PARITY_TOKENS, model.max_positions or PARITY_TOKENS)


@torch.no_grad()
def _reference(
    folder: Path, config: "PreTrainedConfig | None", tokens: Tensor, named: str, **options: bool
) -> Any:
    """What `transformers` computes of a folder, asked with `options`; config: instead of its config.json.

    Raises MemoryError where it runs out, UserError where it cannot for another reason.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # of weights that lie on this machine
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # a part leaves weights alone
    try:
        given = {} if config is None else {"config": config}
        reference = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True, **given
        )
        reference.config.return_dict = True
        output = reference.to(tokens.device).eval()(tokens, **options)
    # It reads configurations of any kind, with code of their own and libraries that need not be there.
    except Exception as error:
        text = " ".join(str(error).split())
        if is_out_of_memory(error):
            # More than its weights, or memory that others took meanwhile.
            raise MemoryError(f"transformers ran out of memory ({text})") from None
        raise UserError(
            f"{named}: transformers cannot compute its logits ({type(error).__name__}: {text}); "
            "mend the folder until AutoModelForCausalLM.from_pretrained loads it"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    return output
