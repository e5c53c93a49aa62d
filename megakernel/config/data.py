"""The data section: which prepared corpora are read, and how documents are treated."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .errors import Problem
from .section import Section


class Corpus(Section):
    """One prepared folder (made by `megakernel prepare`) and its share of the samples."""

    path: Path
    """Folder with manifest.json."""

    weight: float = Field(default=1.0, gt=0)
    """Relative share of the samples drawn from this corpus."""


def _as_corpora(value: Any) -> Any:
    if isinstance(value, dict) and "path" not in value:
        return [{"path": path, "weight": weight} for path, weight in value.items()]
    if isinstance(value, (str, Path, dict)):
        value = [value]
    if isinstance(value, list):
        return [{"path": item} if isinstance(item, (str, Path)) else item for item in value]
    return value


Corpora = Annotated[list[Corpus], BeforeValidator(_as_corpora), Field(min_length=1)]
"""A folder, a list of folders, a mapping folder -> weight, or a list of {path, weight}."""


class Masking(Section):
    """Which tokens a masked language model has to find again, and what stands in their place (BERT's recipe)."""

    rate: float = Field(default=0.15, gt=0, le=1)
    """Share of the tokens that are predicted; the ends of documents never are."""

    mask_share: float = Field(default=0.8, ge=0, le=1)
    """Share of those that become the mask token."""

    random_share: float = Field(default=0.1, ge=0, le=1)
    """Share of those that become another token at random; the rest stays as it is."""

    def problems(self) -> Iterator[Problem]:
        """Shares of more than the whole."""
        if self.mask_share + self.random_share > 1:
            reason = f"and mask_share={self.mask_share} add up to more than 1"
            remedy = f"set at most {1 - self.mask_share:g}"
            yield self.problem("random_share", reason, remedy)


class Data(Section):
    """Prepared token files."""

    train: Corpora
    """Corpora to train on: a folder, a list of folders, a mapping folder -> weight, or a list of {path, weight}."""

    validation: Corpora | None = None
    """Corpora whose validation split is evaluated; None takes those of data.train."""

    isolate_documents: bool = True
    """Attention and positions restart at every document, and no token is predicted across its end."""

    masking: Masking | None = None
    """Which tokens a masked_lm predicts; None takes BERT's 15 %, of them 80 % masked and 10 % random."""

    add_bos: bool | None = None
    """Begin prompts and made examples with the tokenizer's BOS; None: as the documents of data.train do."""

    scored: Literal["all", "answers"] = "all"
    """Tokens a causal_lm is trained on: all, or of tasks the answers alone. Of chats always the assistant's alone."""

    index_cache: Path | None = None
    """Folder of sample indices, deleted when unused for 30 days; None takes `.index_cache` inside the first corpus."""

    num_workers: int = Field(default=1, ge=0, le=1_000)
    """Background processes that read samples, per rank; 0 reads in the training process."""

    @property
    def validation_corpora(self) -> list[Corpus]:
        """Corpora to evaluate on."""
        return self.validation or self.train
