"""config.json of an exported model: our model section, and the keys that `transformers` expects.

Not in `pretrained/`, whose import loads the models of `transformers`, which an export does not need.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from megakernel.config import Model, UserError, validate_section
from megakernel.model import LanguageModel, ModelSettings, cast
from megakernel.parallel import OneProcess

from .dense.families import OWN
from .standalone.code import CODE_FILE, code_of


class MegakernelConfig(PreTrainedConfig):
    """Configuration of our causal language models. All keys have defaults, because `transformers` builds empty ones."""

    model_type = OWN

    model: dict[str, Any] | None = None
    """The complete model section of a run, with the rotary frequencies that the weights were trained with."""

    vocab_size: int = 0
    """Vocabulary size, which is the number of rows of the embedding: files have no padding."""

    max_position_embeddings: int = 0
    """Tokens of the longest training sequence. The model reads longer sequences, unless positions are learned."""

    isolate_documents: bool = True
    """Whether a document ends after eos_token_id, and positions restart."""

    eos_token_id: int | None = None
    """Ends documents."""

    def __post_init__(self, **kwargs: Any):
        if self.model is not None:
            section = self.section
            self.hidden_size = section.hidden_size
            self.num_hidden_layers = section.num_layers
            self.num_attention_heads = section.num_heads
            self.tie_word_embeddings = section.tie_embeddings
        self.auto_map = {
            "AutoConfig": f"{CODE_FILE.removesuffix('.py')}.MegakernelConfig",
            "AutoModelForCausalLM": f"{CODE_FILE.removesuffix('.py')}.MegakernelForCausalLM",
        }
        derived = (
            "auto_map",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "tie_word_embeddings",
        )
        super().__post_init__(**{key: value for key, value in kwargs.items() if key not in derived})

    @property
    def section(self) -> Model:
        """`model`, validated. Raises UserError if it is missing or not valid in this version."""
        return self._section()

    def _section(self, **changes: Any) -> Model:
        if self.model is None:
            raise UserError("config.json has no `model`; export the run again with `megakernel export`")
        return validate_section(Model, {**self.model, **changes}, "config.json: model")

    def language_model(self, *, shapes_only: bool = False) -> LanguageModel:
        """Build the model in torch's default dtype as a run casts it; initialized in float32, or on the meta device."""
        section = self._section(vocab_multiple=1)
        dtype = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.float32)
            settings = ModelSettings(section, self.vocab_size, OneProcess(), shapes_only=shapes_only)
            model = LanguageModel(settings)
        finally:
            torch.set_default_dtype(dtype)
        return cast(model, dtype)

    def save_pretrained(self, save_directory: str | Path, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write config.json and the code that `trust_remote_code=True` runs."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CODE_FILE).write_text(code_of(self.section), encoding="utf-8")
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: otherwise `transformers` would copy this file next to every saved model."""
