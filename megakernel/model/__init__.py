"""Transformer language models around `megakernel.attention`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .language_model import LanguageModel, cast, layer_list
    from .layer_inputs import IGNORED
    from .pipeline import Parted, Pipeline, build_model, stage_layers
    from .self_attention import rotate_by
    from .settings import ModelSettings


_HOMES = {
    "language_model": ("LanguageModel", "cast", "layer_list"),
    "layer_inputs": ("IGNORED",),
    "pipeline": ("Parted", "Pipeline", "build_model", "stage_layers"),
    "self_attention": ("rotate_by",),
    "settings": ("ModelSettings",),
}


def __getattr__(name: str) -> Any:
    # Imported on first use: DeepSpeed takes seconds, and only training has pipelines; what counts needs no torch.
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
