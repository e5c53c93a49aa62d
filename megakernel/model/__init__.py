"""Transformer language models around `megakernel.attention`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .language_model import LanguageModel, cast, layer_list
    from .layer_inputs import IGNORED
    from .pipeline import LocalModel, Pipeline, build_model, stage_layers
    from .self_attention import set_rotary
    from .settings import ModelSettings

_MODULES = {
    "IGNORED": "layer_inputs",
    "LanguageModel": "language_model",
    "ModelSettings": "settings",
    "LocalModel": "pipeline",
    "Pipeline": "pipeline",
    "build_model": "pipeline",
    "cast": "language_model",
    "layer_list": "language_model",
    "set_rotary": "self_attention",
    "stage_layers": "pipeline",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: DeepSpeed takes seconds and only training needs it; counting FLOPs needs no torch.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
