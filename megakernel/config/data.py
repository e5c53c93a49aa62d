"""The data section: which prepared corpora are read, and how documents are treated."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from .section import Section


class Corpus(Section):
    """One prepared folder (made by `megakernel prepare`) and its share of the samples."""

    path: Path
    """Folder with manifest.json."""

    weight: float = Field(default=1.0, gt=0)
    """Relative share of the samples drawn from this corpus."""


def _as_corpora(value: Any) -> Any:
    if isinstance(value, (str, Path)):
        return [{"path": value}]
    if isinstance(value, dict) and "path" not in value:
        return [{"path": path, "weight": weight} for path, weight in value.items()]
    if isinstance(value, dict):
        return [value]
    if isinstance(value, list):
        return [{"path": item} if isinstance(item, (str, Path)) else item for item in value]
    return value


Corpora = Annotated[list[Corpus], BeforeValidator(_as_corpora), Field(min_length=1)]
"""A folder, a list of folders, a mapping folder -> weight, or a list of {path, weight}."""


class Data(Section):
    """Prepared token files."""

    train: Corpora
    """Corpora to train on: a folder, a list of folders, a mapping folder -> weight, or a list of {path, weight}."""

    validation: Corpora | None = None
    """Corpora whose validation split is evaluated; None takes those of data.train."""

    isolate_documents: bool = True
    """Attention, states and positions restart at every document, and no token is predicted across its end."""

    index_cache: Path | None = None
    """Folder of Megatron's sample indices; None takes `.index_cache` inside the first corpus."""

    num_workers: int = Field(default=1, ge=0)
    """Background processes that read samples, per rank; 0 reads in the training process."""

    @property
    def validation_corpora(self) -> list[Corpus]:
        """Corpora to evaluate on."""
        return self.validation or self.train
