"""The training objective of each kind of model."""

from collections.abc import Sequence
from typing import Any, Protocol

from data_pipeline.batch import Batch
from data_pipeline.blend import Blend
from data_pipeline.corpus import Corpora, PreparedCorpus
from data_pipeline.labelled import LabeledDocuments, check_labels
from data_pipeline.masking import MaskedTokens, Vocabulary
from data_pipeline.order import Share
from data_pipeline.packed_text import NextTokens
from data_pipeline.samples import BlendedSamples, index_cache
from megakernel.config.data import Masking
from megakernel.config.errors import UserError
from megakernel.config.tree import Config


class SampleObjective(Protocol):
    """A stream of samples and the targets to predict in them."""

    @property
    def samples(self) -> Blend[Any]:
        """The stream."""

    def batch(self, indices: Sequence[int], share: Share) -> Batch:
        """The share's shard of these samples of the stream."""


def open_objective(
    config: Config, corpora: Corpora, split: str, seq_len: int, seq_len_key: str
) -> SampleObjective:
    """The split's samples of seq_len tokens for the configured kind of model.

    seq_len_key: the configuration key of the length, for errors. Only the train split depends on the run's seed.
    Raises UserError for corpora that hold too little, or data of the wrong kind for this model.
    """
    model, data, parts = config.model, config.data, corpora.of_split(split)
    key, seed = data.key_of(split), config.run.seed if split == "train" else 0
    periodic = data.blend == "periodic"
    vocabulary = Vocabulary(corpora.vocab_size, corpora.eod, corpora.bos)
    if model.classifier is not None:
        named_corpora = [("data.train", corpus) for corpus in corpora.train]
        check_labels([*named_corpora, *((key, corpus) for corpus in parts)], model.classifier)
        prefix = [vocabulary.cls] if model.classifier.pooling == "cls" else []
        documents = model.classifier.documents
        return LabeledDocuments(parts, split, seq_len, seed, documents, prefix, periodic)
    answers = data.scored == "answers"
    if answers:
        check_answers(parts, split, key)
    keys = (key, seq_len_key)
    cache = index_cache(data)
    samples = BlendedSamples(parts, split, seq_len, seed, cache, keys, answers, periodic)
    if model.kind == "masked_lm":
        check_no_chats(parts, key)
        masking = data.masking or Masking()
        return MaskedTokens(samples, data.isolate_documents, masking, vocabulary, seed)
    return NextTokens(samples, data.isolate_documents)


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
