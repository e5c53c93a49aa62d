"""Transformer language models from Megatron-core parts around `megakernel.attention`."""

from .language_model import LanguageModel, cast, layer_list
from .pipeline import Parted, Pipeline, build_model, stage_layers
from .self_attention import rotate_by
from .settings import ModelSettings
from .stream import IGNORED

__all__ = [
    "IGNORED",
    "LanguageModel",
    "ModelSettings",
    "Parted",
    "Pipeline",
    "build_model",
    "cast",
    "layer_list",
    "rotate_by",
    "stage_layers",
]
