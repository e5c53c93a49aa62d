"""Transformer language models from Megatron-core parts around `megakernel.attention`."""

from .language_model import LanguageModel, layer_list, pipeline
from .settings import ModelSettings, padded_vocab_size
from .stream import IGNORED

__all__ = ["IGNORED", "LanguageModel", "ModelSettings", "layer_list", "padded_vocab_size", "pipeline"]
