"""What a model of each kind learns from."""

from collections.abc import Sequence
from typing import Any, Protocol

from data_pipeline.batch import Batch
from data_pipeline.blend import Blend
from data_pipeline.corpus import Corpora, PreparedCorpus
from data_pipeline.labelled import LabelledDocuments, check_labels
from data_pipeline.masking import MaskedTokens, Vocabulary
from data_pipeline.order import Share
from data_pipeline.packed_text import NextTokens
from data_pipeline.samples import BlendedSamples
from megakernel.config.data import Masking
from megakernel.config.errors import UserError
from megakernel.config.tree import Config


class Objective(Protocol):
    """What is to be predicted of each sample of a stream."""

    @property
    def samples(self) -> Blend[Any]:
        """The stream."""

    def batch(self, indices: Sequence[int], share: Share) -> Batch:
        """The share's shard of these samples of the stream."""


def open_objective(config: Config, corpora: Corpora, split: str, seq_len: int, seq_len_key: str) -> Objective:
    """The split's samples of seq_len tokens for the configured kind of model.

    seq_len_key: the configuration key that the length comes from, for errors. Training follows the run's seed;
    others are the same for every seed. Raises UserError for corpora that hold too little, or not what this kind of
    model reads.
    """
    validation_key = "data.validation" if config.data.validation else "data.train"
    named = [("data.train", corpus) for corpus in corpora.train]
    named += [(validation_key, corpus) for corpus in corpora.validation]
    if split == "train":
        parts, key, seed = corpora.train, "data.train", config.run.seed
    else:
        parts, key, seed = corpora.validation, validation_key, 0
    model, data = config.model, config.data
    vocabulary = Vocabulary(corpora.vocab_size, corpora.eod, corpora.bos)
    if model.classifier is not None:
        check_labels(named, model.classifier)
        first = [vocabulary.document] if model.classifier.pooling == "cls" else []
        return LabelledDocuments(parts, split, seq_len, seed, model.classifier.documents, first)
    cache = data.index_cache or data.train[0].path / ".index_cache"
    answers = data.scored == "answers"
    if answers:
        check_answers(parts, split, key)
    samples = BlendedSamples(parts, split, seq_len, seed, cache, keys=(key, seq_len_key), answers=answers)
    if model.kind == "masked_lm":
        check_texts(parts, key)
        masking = data.masking or Masking()
        return MaskedTokens(samples, data.isolate_documents, masking, vocabulary, seed)
    return NextTokens(samples, data.isolate_documents)


def check_texts(corpora: Sequence[PreparedCorpus], key: str) -> None:
    """UserError, naming `key`, where a corpus holds conversations, of which a masked model would learn all tokens."""
    if chats := [str(corpus.folder) for corpus in corpora if corpus.is_chat]:
        raise UserError(
            f"{key}={', '.join(chats)} holds conversations, whose answers a causal_lm learns; set model.kind: "
            "causal_lm, or give corpora of texts"
        )


def check_answers(corpora: Sequence[PreparedCorpus], split: str, key: str) -> None:
    """UserError unless one of the corpora, which `key` names, knows which tokens are answers."""
    if all(corpus.record(split).scored is None for corpus in corpora):
        folders = ", ".join(str(corpus.folder) for corpus in corpora)
        raise UserError(
            f"data.scored=answers: {key}={folders} knows of no answers; "
            "prepare it with --source task:NAME, or set data.scored=all"
        )
