"""The data section: which prepared corpora to read, and how."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .errors import Problem
from .section import Section


class Corpus(Section):
    """One folder written by `megakernel prepare`, and its share of the samples."""

    path: Path
    """Folder that contains manifest.json."""

    weight: float = Field(default=1.0, gt=0)
    """Relative share of the samples that come from this corpus."""


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
    """Masking of a masked language model: which tokens it predicts and what replaces them (BERT's recipe)."""

    rate: float = Field(default=0.15, gt=0, le=1)
    """Share of the tokens that are predicted; end-of-document tokens never are."""

    mask_share: float = Field(default=0.8, ge=0, le=1)
    """Share of the predicted tokens that are replaced by the mask token."""

    random_share: float = Field(default=0.1, ge=0, le=1)
    """Share of the predicted tokens that are replaced by a random token; the rest stay unchanged."""

    def problems(self) -> Iterator[Problem]:
        """Shares that add up to more than 1."""
        if self.mask_share + self.random_share > 1:
            reason = f"and mask_share={self.mask_share} add up to more than 1"
            remedy = f"set at most {1 - self.mask_share:g}"
            yield self.problem("random_share", reason, remedy)


class Data(Section):
    """Prepared token files to train and evaluate on."""

    train: Corpora
    """Corpora to train on: a folder, a list of folders, a mapping folder -> weight, or a list of {path, weight}."""

    validation: Corpora | None = None
    """Corpora whose validation split is evaluated; None: those of data.train."""

    isolate_documents: bool = True
    """Restart attention and positions at every document, and predict no token across a document's end. False lets
    tokens see the other documents of their sequence."""

    masking: Masking | None = None
    """Masking of a masked_lm; None: BERT's, 15 % of tokens predicted, of them 80 % masked and 10 % random."""

    add_bos: bool | None = None
    """Start prompts and generated task examples with the tokenizer's BOS; None: if the documents of data.train do."""

    scored: Literal["all", "answers"] = "all"
    """Tokens whose loss counts for a causal_lm: `all`, or only the `answers` of tasks. In chats only the assistant's
    tokens ever count."""

    index_cache: Path | None = None
    """Folder of sample indices, deleted after 30 days unused; None: `.index_cache` in the first corpus. Set it if that
    folder is read-only."""

    num_workers: int = Field(default=1, ge=0, le=1_000)
    """Background processes per rank that read samples; 0: the training process reads them. Raise it if
    throughput/data_time is high."""

    @property
    def validation_corpora(self) -> list[Corpus]:
        """Corpora used for evaluation."""
        return self.validation or self.train

    def key_of(self, split: str) -> str:
        """The key that names the corpora of a split."""
        return "data.validation" if self.validation and split != "train" else "data.train"
