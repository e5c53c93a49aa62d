"""Number of trained parameters of a model, before it is built."""

from torch import device

from megakernel.config import Attention, Model
from megakernel.parallel import OneProcess

from .language_model import LanguageModel
from .layer import TransformerLayer
from .settings import ModelSettings


def parameter_count(model: Model, vocab_size: int, seq_len: int) -> int:
    """Trained parameters over all processes, low-rank updates apart, counted on layers that take no memory.

    vocab_size: tokens of the tokenizer, padded here to model.vocab_multiple as the embedding is.
    seq_len: rows of a learned position table, and columns of linformer, where model.max_positions is not set.
    """
    different: list[Attention] = []
    for attention in model.attentions:
        if attention not in different:
            different.append(attention)
    # Layers of one attention are alike: one of them is built.
    changes = {"num_layers": len(different), "attention_pattern": different}
    small = model.model_copy(update=changes | {"max_positions": model.max_positions or seq_len})
    with device("meta"):
        built = LanguageModel(
            ModelSettings(small, vocab_size + model.special_ids, OneProcess(), shapes_only=True)
        )
    count = sum(parameter.numel() for parameter in built.parameters())
    for layer in built.modules():
        if isinstance(layer, TransformerLayer):
            others = model.attentions.count(different[layer.index]) - 1
            count += others * sum(parameter.numel() for parameter in layer.parameters())
    return count
