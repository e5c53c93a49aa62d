"""The data section: which corpora to read, and how."""

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from .errors import ConfigError, Problem
from .section import Section


class Corpus(Section):
    """One corpus and its share of the samples."""

    path: Path
    """Folder that contains manifest.json, or the prefix of Megatron's token files."""

    weight: float | None = Field(default=None, gt=0)
    """Relative share of the samples that come from this corpus; null, for all corpora of a list: its tokens."""


def _as_corpora(value: Any) -> Any:
    if isinstance(value, dict) and "path" not in value:
        value = [{"path": path, "weight": _checked_weight(path, weight)} for path, weight in value.items()]
    elif isinstance(value, (str, Path, dict)):
        value = [value]
    if not isinstance(value, list):
        return value
    listed = [{"path": item} if isinstance(item, (str, Path)) else item for item in value]
    return [one for item in listed for one in (_expanded(item) if isinstance(item, dict) else [item])]


def _checked_weight(path: Any, weight: Any) -> Any:
    """The weight, if a corpus may have it; ConfigError names the corpus, which has no key of its own in a mapping."""
    try:
        Corpus.model_validate({"path": "data", "weight": weight})
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ").removeprefix("Input ")
        wrong = f"has the weight {weight!r}, which {reason}"
        raise ConfigError([Problem("", path, wrong, "change its weight, or leave the corpus out")]) from None
    return weight


def _expanded(corpus: dict[str, Any]) -> list[dict[str, Any]]:
    """A corpus with the ending of a token file removed; of a pattern such as `data/web-*` all that match, sorted.

    A pattern that nothing matches yet, or that has a weight, stays.
    """
    path = corpus.get("path")
    if not isinstance(path, (str, Path)) or "\0" in str(path):
        return [corpus]
    place = Path(os.path.expanduser(path))
    if is_pattern(place) and corpus.get("weight") is None:
        matches = {_without_ending(Path(match)) for match in glob.glob(str(place))}
        if matches:
            return [{**corpus, "path": match} for match in sorted(matches)]
    return [{**corpus, "path": _without_ending(place)}]


def _without_ending(path: Path) -> Path:
    is_token_file = path.suffix in (".bin", ".idx") and not path.is_dir()
    return path.with_suffix("") if is_token_file else path


def is_pattern(path: Path) -> bool:
    """Whether a path is no file or folder but a pattern of them, such as `data/web-*`."""
    return any(character in str(path) for character in "*?[") and not path.exists()


_ShortCorpora = Path | Corpus | dict[str, Annotated[float, Field(gt=0)] | None] | list[Path | Corpus]

Corpora = Annotated[
    list[Corpus], BeforeValidator(_as_corpora, json_schema_input_type=_ShortCorpora), Field(min_length=1)
]
"""A folder, prefix or pattern, a list of them, a mapping path -> weight, or a list of {path, weight}."""


class DataStage(Section):
    """Another mixture of corpora, from one step of the run on."""

    train: Corpora
    """Corpora to train on from there, in the forms of data.train. Text that the run has read already comes last."""

    from_step: int | None = Field(default=None, gt=0)
    """Steps of the run before it; null with from_tokens."""

    from_tokens: int | None = Field(default=None, gt=0)
    """Tokens that the run reads before it, rounded up to whole steps; null with from_step."""

    def problems(self) -> Iterator[Problem]:
        """No start, or two of them, and weights for some corpora only."""
        if (self.from_step is None) == (self.from_tokens is None):
            given = "neither" if self.from_step is None else "both"
            reason = f"and from_tokens={self.from_tokens} are {given} given"
            yield Problem("from_step", self.from_step, reason, "give one of the two")
        yield from _weight_problems("train", self.train)


class TextOrder(Section):
    """What the order of a run's text depends on besides the other keys; a resumed run sets it."""

    is_internal = True

    planned_until: dict[int, Annotated[int, Field(ge=0)]] = Field(default={})
    """Sequence length -> step at which its phases were to end when the run began, 0 if they had no end, where that is
    not their end now. Text behind it is for longer sequences."""


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
    """Token files to train and evaluate on."""

    train: Corpora
    """Corpora to train on: folders of `megakernel prepare` or prefixes of Megatron's token files, as one path, a list
    of paths, a mapping path -> weight, or a list of {path, weight}. `data/web-*` is every folder or prefix that
    matches. Without weights, corpora are read in proportion to their tokens."""

    stages: list[DataStage] = Field(default=[])
    """Mixtures that follow data.train, in order, each from a step or token of the run on, such as better text for the
    last tenth of a run. A run may get new ones when it resumes."""

    unread_first: bool = True
    """Sequences of another length begin with text that those before them have not read; false: at the start, as in
    earlier versions. A run continues as it began."""

    order: TextOrder = TextOrder()
    """What a resumed run keeps of the order that it began with."""

    validation: Corpora | None = None
    """Corpora whose validation split is evaluated, of Megatron's token files all; None: those of data.train, also in
    later stages."""

    tokenizer: str | None = None
    """Tokenizer of Megatron's token files, which do not name theirs: byte, pixels, or a Hugging Face tokenizer's folder
    or hub name."""

    verify: Literal["full", "sizes", "none"] = "full"
    """How corpora are checked before training: `full` also reads every file once and compares its SHA-256 with the
    manifest, as long as the files do not change; `sizes` compares the files' sizes; `none` reads only the manifests."""

    blend: Literal["exact", "periodic"] = "exact"
    """Order of the corpora: `exact` gives each its share of any number of samples, to one sample; `periodic` repeats
    the same 65,536 choices, as earlier versions did. A run continues with the order that it began with."""

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

    def problems(self) -> Iterator[Problem]:
        """Weights for some corpora only, or for a pattern."""
        for key in ("train", "validation"):
            yield from _weight_problems(key, getattr(self, key) or [])

    def corpora_of(self, split: str, stage: int = 0) -> list[Corpus]:
        """The corpora of a split; stage: for train, the number of the stage from 1, 0 for data.train."""
        if split != "train":
            return self.validation or self.train
        return self.stages[stage - 1].train if stage else self.train

    def key_of(self, split: str, stage: int = 0) -> str:
        """The key that names `corpora_of`."""
        if split != "train" and self.validation:
            return "data.validation"
        return f"data.stages.{stage - 1}.train" if split == "train" and stage else "data.train"


def _weight_problems(key: str, corpora: list[Corpus]) -> Iterator[Problem]:
    without = [corpus for corpus in corpora if corpus.weight is None]
    if 0 < len(without) < len(corpora):
        reason = "has no weight, but other corpora do"
        yield Problem(key, without[0].path, reason, "give each corpus a weight, or none of them")
    for corpus in corpora:
        if corpus.weight is not None and is_pattern(corpus.path):
            reason = f"is a pattern with the weight {corpus.weight:g}, and no folder"
            yield Problem(key, corpus.path, reason, "write each folder with its own weight")
