"""The number of parameters of a model, without building it in memory."""

from typing import Any

from torch import device

from megakernel.attention.compression import shared_compressors
from megakernel.config import Attention, Model
from megakernel.parallel import OneProcess

from .language_model import LanguageModel
from .layer import TransformerLayer
from .settings import ModelSettings


def parameter_count(model: Model, vocab_size: int, seq_len: int) -> int:
    """Parameters of the whole model without low-rank updates, counted on the meta device.

    vocab_size: without padding, which is counted too. seq_len: rows of a learned position table and columns of
    linformer if model.max_positions is not set.
    """
    unique: list[Attention] = []
    for attention in model.attentions:
        if attention not in unique:
            unique.append(attention)
    # Layers with the same attention have equally many parameters, but for those that only the first of them has: build
    # one of each. Encoders and decoders are built whole.
    changes: dict[str, Any] = {"num_layers": len(unique), "attention_pattern": unique}
    if model.encoder is not None:
        changes, unique = {}, []
    small = model.model_copy(update=changes | {"max_positions": model.max_positions or seq_len})
    with device("meta"):
        built = LanguageModel(
            ModelSettings(small, vocab_size + model.special_ids, OneProcess(), shapes_only=True)
        )
    count = sum(parameter.numel() for parameter in built.parameters())
    of_all_layers = {compressor.matrices for compressor in shared_compressors(built)}
    for layer in built.modules():
        if unique and isinstance(layer, TransformerLayer):
            others = model.attentions.count(unique[layer.index]) - 1
            own = (parameter for parameter in layer.parameters() if parameter not in of_all_layers)
            count += others * sum(parameter.numel() for parameter in own)
    return count
