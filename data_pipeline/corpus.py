"""Prepared folders as a run's corpora, checked when they are opened."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from data_pipeline import tokenizers
from data_pipeline.manifest import Manifest, SplitRecord
from data_pipeline.token_files import INDEX_HEADER, INDEX_MAGIC, TokenFile, scored_prefix
from data_pipeline.tokenizers import Tokenizer
from data_pipeline.verification import TOKEN_TYPES, verify_split, verify_tokenizer
from megakernel.config.data import Corpus as CorpusConfig
from megakernel.config.data import Data
from megakernel.config.errors import UserError

_REMEDY = "copy the folder from where it was prepared, or prepare it again"


@dataclass(frozen=True)
class PreparedCorpus:
    """One folder of `megakernel prepare` and its share of the samples."""

    folder: Path
    weight: float | None
    """Relative share of the samples; None: its tokens."""

    manifest: Manifest

    def prefix(self, split: str) -> Path:
        """Path of the split's token files without the extension."""
        return self.folder / split

    @property
    def is_chat(self) -> bool:
        """Whether its documents are conversations, in which only the assistant's tokens count."""
        return self.manifest.chat_template is not None

    def record(self, split: str) -> SplitRecord:
        """Counts and files of an existing split."""
        return self.manifest.splits[split]

    def share(self, split: str) -> float:
        """Its weight, or the tokens of the split."""
        return float(self.record(split).tokens) if self.weight is None else self.weight

    def scored_file(self, split: str, answers: bool) -> TokenFile | None:
        """The file of flags for tokens of answers; None unless it exists, and `answers` or conversations require it."""
        if not (answers or self.is_chat) or self.record(split).scored is None:
            return None
        return TokenFile(scored_prefix(self.prefix(split)))


class Corpora:
    """The corpora of a run, all of one tokenizer.

    Opening a split raises UserError naming the key for a folder that is missing, not prepared, or without the split;
    for token files that are missing, truncated or not Megatron's; and for corpora of different tokenizers.
    """

    def __init__(self, data: Data, *, validation: bool = True, verify: bool = True):
        """Open the train split, and the validation split if it will be read (training.eval_samples > 0).

        verify: check the files' SHA-256, which reads each of them once per machine; otherwise only their sizes.
        """
        self._data, self._verify = data, verify
        self._splits: dict[str, list[PreparedCorpus]] = {}
        self.train = self.of_split("train")
        if validation:
            self.of_split("validation")
        self._add_bos = data.add_bos
        self._all_tokens_count = data.scored == "all"
        tokenizer_record = self.train[0].manifest.tokenizer
        self.vocab_size = tokenizer_record.vocab_size
        """Number of ids of the tokenizer, end-of-document included."""
        self.eod = tokenizer_record.eod
        """The token that ends documents."""
        self.bos = tokenizer_record.bos
        """The token that every document begins with; None if there is none."""
        self.tokenizer_hash = tokenizer_record.hash
        """Equal for runs and corpora of the same tokenizer."""

    @property
    def tokenizer_folder(self) -> Path:
        """Folder for `tokenizers.load`: that of a corpus of conversations, if any, since it has the template."""
        corpus = next((corpus for corpus in self.train if corpus.is_chat), self.train[0])
        return corpus.folder / "tokenizer"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The corpora's tokenizer, with data.add_bos."""
        return tokenizers.load(self.tokenizer_folder, add_bos=self._add_bos)

    def of_split(self, split: str) -> list[PreparedCorpus]:
        """data.train for train, else the corpora for evaluation; the first call opens them."""
        if split not in self._splits:
            key = self._data.key_of(split)
            configs = self._data.train if split == "train" else self._data.validation_corpora
            corpora = [_open(key, config, split, self._verify) for config in configs]
            train = self._splits.get("train", corpora)
            _check_one_tokenizer(corpora, key, train[0])
            _check_one_template([*train, *corpora])
            self._splits[split] = corpora
        return self._splits[split]

    def bytes_per_token(self, split: str) -> float:
        """UTF-8 bytes of text per token, weighted by each corpus's share of the tokens.

        Bits per byte = loss / ln 2 / bytes_per_token; the loss of end-of-document tokens is charged to the text.
        """
        corpora = self.of_split(split)
        total = sum(corpus.share(split) for corpus in corpora)
        return sum(
            corpus.share(split) / total * corpus.record(split).bytes / corpus.record(split).tokens
            for corpus in corpora
        )

    def is_text(self, split: str) -> bool:
        """Whether all tokens of the split count, so that a causal model's loss is a code length of the text."""
        return self._all_tokens_count and not any(corpus.is_chat for corpus in self.of_split(split))

    def bits_per_byte(self, loss: float, split: str) -> float:
        """Loss in nats per token -> bits per UTF-8 byte of the split's text, comparable across tokenizers."""
        return loss / math.log(2) / self.bytes_per_token(split)


def _open(key: str, config: CorpusConfig, split: str, verify: bool) -> PreparedCorpus:
    try:
        manifest = Manifest.read(config.path)
    except UserError as error:
        raise UserError(f"{key}={error}") from error
    corpus = PreparedCorpus(config.path, config.weight, manifest)
    if split not in manifest.splits:
        remedy = "; or set training.eval_samples=0" if split == "validation" else ""
        raise UserError(f"{key}={config.path} has no {split} split; prepare it with one{remedy}")
    _check_files(key, corpus, split, verify)
    return corpus


def _check_files(key: str, corpus: PreparedCorpus, split: str, verify: bool) -> None:
    record = corpus.record(split)
    for name, expected in corpus.manifest.files(split).items():
        file = corpus.folder / name
        if not file.is_file():
            raise UserError(f"{key}={corpus.folder} lacks {name}; {_REMEDY}")
        if (size := file.stat().st_size) != expected.size:
            raise UserError(
                f"{key}={corpus.folder} holds a truncated or foreign {name} ({size} bytes, not "
                f"{expected.size}); {_REMEDY}"
            )
    with (corpus.folder / f"{split}.idx").open("rb") as stream:
        header = stream.read(INDEX_HEADER.size)
    magic, _, token_type, sequences, _ = INDEX_HEADER.unpack(header.ljust(INDEX_HEADER.size))
    is_known = (
        token_type in TOKEN_TYPES and record.bin.size == TOKEN_TYPES[token_type].itemsize * record.tokens
    )
    if magic != INDEX_MAGIC or sequences != record.documents or not is_known:
        raise UserError(f"{key}={corpus.folder} holds a foreign {split}.idx; {_REMEDY}")
    try:
        verify_tokenizer(corpus.folder, corpus.manifest)
        if verify:
            verify_split(corpus.folder, corpus.manifest, split, token_type)
    except UserError as error:
        raise UserError(f"{key}={corpus.folder} {error}; {_REMEDY}") from None


def _check_one_template(corpora: Iterable[PreparedCorpus]) -> None:
    chats = [corpus for corpus in corpora if corpus.is_chat]
    for first, other in pairwise(chats):
        if other.manifest.chat_template != first.manifest.chat_template:
            raise UserError(
                f"data.train: {other.folder} was prepared with another chat template than {first.folder}; prepare it "
                f"with --tokenizer {first.folder / 'tokenizer'}"
            )


def _check_one_tokenizer(corpora: Iterable[PreparedCorpus], key: str, first: PreparedCorpus) -> None:
    expected = first.manifest.tokenizer
    for corpus in corpora:
        record = corpus.manifest.tokenizer
        if record.hash != expected.hash:
            raise UserError(
                f"{key}={corpus.folder} was prepared with another tokenizer ({record.kind}, "
                f"{record.vocab_size} ids) than {first.folder} ({expected.kind}, {expected.vocab_size} ids); "
                f"prepare it with --tokenizer {first.folder / 'tokenizer'}"
            )
        if record.bos != expected.bos:
            flag = "--no-add-bos" if expected.bos is None else "--add-bos"
            raise UserError(
                f"{key}={corpus.folder} begins documents with token {record.bos}, {first.folder} with {expected.bos} "
                f"(None: no BOS); prepare it with {flag}"
            )
