"""The training objective of each kind of model."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from data_pipeline.batch import Batch
from data_pipeline.blend import Blend, blend_order
from data_pipeline.corpus import Corpora, PreparedCorpus
from data_pipeline.document import DOCUMENTS_PER_PAIR
from data_pipeline.examples import Cut, example_weights, examples_of
from data_pipeline.labelled import LabeledDocuments, check_labels
from data_pipeline.masking import MaskedTokens, Vocabulary
from data_pipeline.order import Share
from data_pipeline.packed_text import NextTokens
from data_pipeline.pairs import TranslationPairs, check_no_pairs, check_pairs
from data_pipeline.reading import Place, Source, Stream, places
from data_pipeline.samples import BlendedSamples, index_cache, samples_of
from megakernel.config.data import Masking
from megakernel.config.data_phases import DataPhase
from megakernel.config.errors import UserError
from megakernel.config.model import Model
from megakernel.config.tree import Config


class SampleObjective(Protocol):
    """A stream of samples and the targets to predict in them."""

    @property
    def samples(self) -> Blend[Any]:
        """The stream."""

    def batch(self, indices: Sequence[int], share: Share) -> Batch:
        """The share's shard of these samples of the stream."""

    def cut(self) -> list[Cut]:
        """How many documents of each corpus's split are longer than a sequence, where each has one of its own."""


def open_objective(
    config: Config,
    corpora: Corpora,
    split: str,
    seq_len: int,
    seq_len_key: str,
    stage: int = 0,
    places: Sequence[Place] | None = None,
) -> SampleObjective:
    """The split's samples of seq_len tokens for the configured kind of model.

    seq_len_key: the configuration key of the length, for errors. stage: see `Corpora.of_split`. places: where in each
    corpus the stream reads; None: from the start. Only the train split depends on the run's seed.
    Raises UserError for corpora that hold too little, or data of the wrong kind for this model.
    """
    model, data, parts = config.model, config.data, corpora.of_split(split, stage)
    key, seed = data.key_of(split, stage), config.run.seed if split == "train" else 0
    periodic = data.blend == "periodic"
    vocabulary = Vocabulary(corpora.vocab_size, corpora.eod, corpora.bos)
    starts = None if places is None else [place.start for place in places]
    if model.kind == "encoder_decoder":
        check_pairs((key, corpus) for corpus in parts)
        return TranslationPairs(parts, split, seq_len, seed, corpora.eod, periodic, starts)
    if model.classifier is not None:
        check_no_pairs(parts, key)
        named_corpora = [("data.train", corpus) for corpus in corpora.train]
        check_labels([*named_corpora, *((key, corpus) for corpus in parts)], model.classifier)
        prefix = [vocabulary.cls] if model.classifier.pooling == "cls" else []
        documents = model.classifier.documents
        return LabeledDocuments(parts, split, seq_len, seed, documents, prefix, periodic, starts)
    answers = data.scored == "answers"
    if answers:
        check_answers(parts, split, key)
    keys = (key, seq_len_key)
    cache = index_cache(data)
    samples = BlendedSamples(parts, split, seq_len, seed, cache, keys, answers, periodic, places)
    if model.kind == "masked_lm":
        check_no_chats(parts, key)
        masking = data.masking or Masking()
        return MaskedTokens(samples, data.isolate_documents, masking, vocabulary, seed)
    return NextTokens(samples, data.isolate_documents)


def open_training(config: Config, corpora: Corpora, parts: Sequence[DataPhase]) -> list[SampleObjective]:
    """The training samples of each phase; phases of one stream share them. Errors as for `open_objective`.

    parts: `data_phases` of the configuration. Those from training.steps on are not opened: the list is as long as what
    the run reads.
    """
    streams: dict[int, DataPhase] = {}
    for part in parts:
        streams.setdefault(part.phase.stream_start, part)
    found = places([_stream(config, corpora, part) for part in streams.values()], config.data.unread_first)
    objectives = {
        start: open_objective(
            config,
            corpora,
            "train",
            part.phase.training.seq_len,
            f"{part.phase.key}.seq_len",
            part.mixture,
            place,
        )
        for (start, part), place in zip(streams.items(), found)
        if part.phase.first_step < config.training.steps
    }
    return [objectives[start] for part in parts if (start := part.phase.stream_start) in objectives]


def _stream(config: Config, corpora: Corpora, part: DataPhase) -> Stream:
    """What a stream takes of each corpus."""
    phase, documents = part.phase, _documents_per_example(config.model)
    parts, seq_len = corpora.of_split("train", part.mixture), phase.training.seq_len
    if documents is not None:
        weights = example_weights(parts, "train", documents)
        sizes = [max(1, examples_of(corpus, "train", documents)) for corpus in parts]
    else:
        weights = [corpus.share("train") for corpus in parts]
        # `BlendedSamples` refuses a corpus without a whole sample.
        sizes = [max(1, samples_of(corpus, "train", seq_len)) for corpus in parts]
    # A folder that is listed twice is read twice.
    seen: Counter[str] = Counter()
    sources = []
    for corpus, size in zip(parts, sizes):
        content = corpus.record("train").bin.sha256
        sources.append(Source(f"{content}-{seen[content]}", size))
        seen[content] += 1
    samples = None if phase.stream_end is None else phase.stream_end - phase.stream_start
    planned = None if part.planned_end is None else max(0, part.planned_end - phase.stream_start)
    unit = 1 if documents is not None and config.data.unread_first else seq_len
    return Stream(unit, sources, blend_order(weights, config.data.blend == "periodic"), samples, planned)


def _documents_per_example(model: Model) -> int | None:
    """Documents that are one sample together, however long; None: samples are packed text."""
    if model.classifier is not None:
        return model.classifier.documents
    return DOCUMENTS_PER_PAIR if model.kind == "encoder_decoder" else None


def check_no_chats(corpora: Sequence[PreparedCorpus], key: str) -> None:
    """UserError, naming `key`, if a corpus holds conversations: a masked model would learn all of their tokens."""
    if chats := [str(corpus) for corpus in corpora if corpus.is_chat]:
        raise UserError(
            f"{key}={', '.join(chats)} holds conversations, whose answers a causal_lm learns; set model.kind: "
            "causal_lm, or give corpora of texts"
        )


def check_answers(corpora: Sequence[PreparedCorpus], split: str, key: str) -> None:
    """UserError, naming `key`, unless one of the corpora records which tokens are answers."""
    if all(corpus.record(split).scored is None for corpus in corpora):
        folders = ", ".join(str(corpus) for corpus in corpora)
        raise UserError(
            f"data.scored=answers: {key}={folders} records no answers; "
            "prepare it with --source task:NAME, or set data.scored=all"
        )
