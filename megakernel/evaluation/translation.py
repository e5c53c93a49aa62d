"""`--task translation`: BLEU of an encoder-decoder's translations; needs the extra `eval`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import Field

from data_pipeline.pairs import TranslationPairs, check_pairs
from megakernel.checkpoint.opened import OpenedModel
from megakernel.config import UserError
from megakernel.config.decoding import Beams
from megakernel.config.extras import need
from megakernel.config.section import Section

from .language_modelling import evaluated_config
from .result import Table, number
from .subject import LoadedRun, OnPass, OpenedRun

if TYPE_CHECKING:
    from megakernel.model import LanguageModel

TRANSLATION = "translation"
"""Name of the task."""

SHOWN = 5
"""Translations in the table."""


class Translate(Protocol):
    """What translates: `megakernel.generation`, which evaluation does not import, passed by the command."""

    def __call__(
        self,
        opened: OpenedModel,
        model: "LanguageModel",
        sources: Sequence[Sequence[int]],
        *,
        most_tokens: int,
        beams: int,
        length_penalty: float,
    ) -> Iterator[tuple[int, str, bool]]:
        """(index of a source, its translation, whether that has an end) as each is complete.

        sources: their ids, each with its end. most_tokens: of a translation. beams, length_penalty: see `Beams`.
        """


class TranslationOptions(Section):
    """Options of `translation:`."""

    samples: int | None = Field(default=None, ge=1)
    """Pairs, the first ones of the split's order; null takes --samples, else training.eval_samples."""

    beams: int = Field(default=Beams.count, ge=1, le=10_000)
    """Hypotheses that are continued at the same time; 1 takes the most likely token each time."""

    length_penalty: float = Field(default=Beams.length_penalty, ge=0, le=100)
    """Power of its number of tokens by which a text's log-probability is divided."""

    split: str = "validation"
    """Split of the validation corpora, such as test."""


@dataclass(frozen=True)
class TranslationTask:
    """The task with its options."""

    spec: str
    options: TranslationOptions

    translate: Translate | None
    """What translates; None: the task is refused."""

    @property
    def split(self) -> str | None:
        """The split whose pairs it translates."""
        return self.options.split

    def check(self, source: OpenedRun) -> None:
        """UserError for a model that does not translate, no pairs to translate, or without sacrebleu."""
        if (kind := source.config.model.kind) != "encoder_decoder":
            raise UserError(
                f"--task {self.spec}: model.kind={kind} of {source.folder} does not translate; give a run of an "
                "encoder_decoder, or --task lm"
            )
        if self.translate is None:
            raise UserError(f"--task {self.spec}: no function that translates was given; leave it out")
        evaluated_config(source.config, self.options.samples, None)
        key = source.config.data.key_of(self.options.split)
        check_pairs(
            ((key, corpus) for corpus in source.text.of_split(self.options.split)),
            otherwise="give --data a folder of pairs",
        )
        need(f"--task {TRANSLATION}", "sacrebleu")

    def measure(self, subject: LoadedRun, progress: OnPass) -> "TranslationScore":
        """BLEU of the translations, with the texts."""
        from sacrebleu.metrics.bleu import BLEU

        options, tokenizer = self.options, subject.tokenizer
        training = evaluated_config(subject.config, options.samples, None).training
        parts = subject.text.of_split(options.split)
        pairs = TranslationPairs(parts, options.split, training.seq_len, 0, tokenizer.eod)
        size = min(training.eval_samples, pairs.samples.per_epoch)
        examples = [pairs.samples[index] for index in range(size)]
        sources = [pairs.source(example).tolist() for example in examples]
        assert self.translate is not None
        translations, complete, done = [""] * size, 0, count(1)
        for index, text, has_end in self.translate(
            subject,
            subject.model,
            sources,
            most_tokens=training.seq_len,
            beams=options.beams,
            length_penalty=options.length_penalty,
        ):
            translations[index] = text
            complete += has_end
            progress(next(done), size)
        texts, references = (
            [tokenizer.decode(example.documents[side].tolist()) for example in examples] for side in (0, 1)
        )
        unknown_sources, unknown_references = (
            sum(tokenizer.unknown in example.documents[side].tolist() for example in examples)
            for side in (0, 1)
        )
        metric = BLEU()
        found = metric.corpus_score(translations, [references])
        return TranslationScore(
            task=self.spec,
            run=str(subject.folder),
            step=subject.step,
            bleu=found.score,
            precisions=tuple(found.precisions),
            length_ratio=found.ratio,
            brevity_penalty=found.bp,
            signature=str(metric.get_signature()),
            unended=size - complete,
            cut_sources=sum(len(example.documents[0]) > training.seq_len for example in examples),
            unknown_sources=unknown_sources,
            unknown_references=unknown_references,
            distinct=len({tuple(ids.tobytes() for ids in example.documents) for example in examples}),
            seq_len=training.seq_len,
            texts=tuple(zip(texts, translations, references)),
        )


@dataclass(frozen=True)
class TranslationScore:
    """A checkpoint's translations of a split."""

    task: str
    """The spec of `--task`."""

    run: str
    """Folder of the run."""

    step: int
    """Optimizer steps of the checkpoint."""

    bleu: float
    """Of the whole corpus, in percent."""

    precisions: tuple[float, ...]
    """Of n-grams of 1 to 4 words, in percent."""

    length_ratio: float
    """Words of translations over those of references."""

    brevity_penalty: float
    signature: str
    """sacrebleu's, with tokenization and version."""

    unended: int
    """Translations that were cut at `seq_len` tokens."""

    cut_sources: int
    """Sources that were cut there; references never are."""

    unknown_sources: int
    """Sources with a word that the tokenizer has no id for."""

    unknown_references: int
    """References with one: all such words are the same to BLEU."""

    distinct: int
    """Pairs that differ: corpora may hold one twice, and weights have small corpora read again before others end."""

    seq_len: int
    texts: tuple[tuple[str, str, str], ...]
    """(source, translation, reference) of each pair."""

    def scalars(self) -> dict[str, float]:
        """BLEU, and how long the translations are."""
        return {"bleu": self.bleu, "length_ratio": self.length_ratio}

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        names = ("source", "translation", "reference")
        texts = [dict(zip(names, text)) for text in self.texts]
        return {**vars(self), "precisions": list(self.precisions), "texts": texts}

    def table(self) -> Table:
        """The first translations, and the score."""
        by_words = "/".join(f"{precision:.1f}" for precision in self.precisions)
        distinct = f", {self.distinct:,} of them distinct," if self.distinct < len(self.texts) else ""
        below = [
            f"BLEU {number(self.bleu, 2)} of {len(self.texts):,} pairs{distinct} ({by_words}, brevity penalty "
            f"{self.brevity_penalty:.3f}, length ratio {self.length_ratio:.3f})",
            self.signature,
        ]
        if self.unended:
            below.append(f"without an end within {self.seq_len:,} tokens: {self.unended:,} translations")
        if self.cut_sources:
            below.append(f"cut at {self.seq_len:,} tokens: {self.cut_sources:,} sources")
        if self.unknown_references or self.unknown_sources:
            below.append(
                "words unknown to the tokenizer, which BLEU takes as equal: "
                f"in {self.unknown_references:,} references, {self.unknown_sources:,} sources"
            )
        rows = self.texts[:SHOWN]
        title = f"{self.task}: {self.run} at step {self.step}"
        if len(self.texts) > SHOWN:
            title += f", the first {SHOWN} of {len(self.texts):,} translations"
        return Table(title, ("source", "translation", "reference"), rows, below=tuple(below))
