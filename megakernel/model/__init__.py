"""Transformer language models around `megakernel.attention`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .language_model import LanguageModel, cast, layer_list
from .layer_inputs import IGNORED
from .self_attention import rotate_by
from .settings import ModelSettings

if TYPE_CHECKING:
    from .pipeline import Parted, Pipeline, build_model, stage_layers

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


def __getattr__(name: str) -> Any:
    # Imported on first use: DeepSpeed takes seconds, and only training has pipelines.
    if name not in ("Parted", "Pipeline", "build_model", "stage_layers"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.pipeline"), name)
