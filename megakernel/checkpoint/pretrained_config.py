"""config.json of an exported model, and the code beside it.

Not in `pretrained/`, whose import loads the models of `transformers`, which an export does not need.
"""

from pathlib import Path
from typing import Any, ClassVar

from megakernel import __version__
from megakernel.config import Model, validate_section

from .dense.own import kind_of, own_config, own_section, package_mechanisms
from .modeling.configuration import MegakernelConfig as ModelingConfig
from .modeling.joined import MAPS, joined_code

CODE_FILE = "modeling_megakernel.py"
"""The file that `trust_remote_code=True` runs."""

_IMPORTS = '''# SPDX-License-Identifier: Apache-2.0
"""A causal language model for `transformers`, written by megakernel {version}.

It needs Megakernel installed, because only that has the mechanisms of its layers: {mechanisms}.
"""

try:
    from megakernel.checkpoint.pretrained import MegakernelConfig, MegakernelForCausalLM, MegakernelModel
except ImportError as error:
    raise ImportError(f"this model needs Megakernel ({{error}}); install it from its sources") from None

__all__ = ["MegakernelConfig", "MegakernelForCausalLM", "MegakernelModel"]
'''


def code_of(model: Model) -> str:
    """Text of `modeling_megakernel.py`: a file that needs torch and `transformers` alone, or one that imports us."""
    if mechanisms := package_mechanisms(model):
        return _IMPORTS.format(version=__version__, mechanisms=", ".join(mechanisms))
    ropes = [model.layer_rope(index) for index in range(model.num_layers)]
    more = ["rope_scaling"] if any(rope is not None and rope[1].kind != "none" for rope in ropes) else []
    more += ["short_convolution"] if any(a.short_convolution for a in model.attentions) else []
    more += ["added_positions"] if model.position in ("learned", "sinusoidal") else []
    more += [MAPS[a.feature_map.name] for a in model.attentions if a.feature_map is not None]
    return joined_code(map(kind_of, model.attentions), more, __version__)


class MegakernelConfig(ModelingConfig):
    """The configuration of our causal language models, with their model section."""

    _auto_class: ClassVar[str | None] = None

    def __post_init__(self, model: dict[str, Any] | None = None, **kwargs: Any):
        """model: the model section, as config.json of earlier versions has it; else the other keys say all."""
        if model is not None:
            section = validate_section(
                Model, {**model, "vocab_size": self.vocab_size or None}, "config.json: model"
            )
            for key, value in own_config(section).items():
                setattr(self, key, value)
                kwargs.pop(key, None)
        super().__post_init__(**kwargs)

    @property
    def section(self) -> Model:
        """The model section. Raises UserError if it is incomplete or not valid in this version."""
        return validate_section(Model, own_section(self.to_dict(), "config.json"), "config.json")

    def save_pretrained(self, save_directory: str | Path, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write config.json and the code that `trust_remote_code=True` runs."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CODE_FILE).write_text(code_of(self.section), encoding="utf-8")
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: otherwise `transformers` would copy this file next to every saved model."""
