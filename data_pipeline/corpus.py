"""A run's corpora: prepared folders and Megatron's token files, checked when they are opened."""

import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path

from data_pipeline import megatron_files, tokenizers
from data_pipeline.manifest import FILE, FileRecord, Manifest, SplitRecord, check_same_tokenizer
from data_pipeline.token_files import INDEX_HEADER, INDEX_MAGIC, TokenFile, scored_prefix, token_file
from data_pipeline.tokenizers import Tokenizer
from data_pipeline.verification import TOKEN_TYPES, verify_split, verify_tokenizer
from megakernel.config.data import Corpus as CorpusConfig
from megakernel.config.data import Data, is_pattern
from megakernel.config.errors import UserError

_REMEDY = "copy the folder from where it was prepared, or prepare it again"

_VERIFYING_THREADS = min(8, os.cpu_count() or 1)
"""Corpora that are read at once; hashing releases Python's lock."""


@dataclass(frozen=True)
class PreparedCorpus:
    """One corpus and its share of the samples."""

    folder: Path
    """Of its manifest and tokenizer."""

    weight: float | None
    """Relative share of the samples; None: its tokens."""

    manifest: Manifest

    token_prefix: Path | None = None
    """Prefix of Megatron's token files; None: they are in the folder, named by split."""

    def __str__(self) -> str:
        return str(self.token_prefix or self.folder)

    def prefix(self, split: str) -> Path:
        """Path of the split's token files without the extension."""
        return self.folder / split if self.token_prefix is None else self.token_prefix

    @property
    def is_chat(self) -> bool:
        """Whether its documents are conversations, in which only the assistant's tokens count."""
        return self.manifest.chat_template is not None

    def record(self, split: str) -> SplitRecord:
        """Counts and files of an existing split."""
        return self.manifest.splits[self._recorded(split)]

    def files(self, split: str) -> dict[str, FileRecord]:
        """Name -> record of every file of an existing split."""
        return self.manifest.files(self._recorded(split))

    def _recorded(self, split: str) -> str:
        return split if self.token_prefix is None else megatron_files.SPLIT

    def share(self, split: str) -> float:
        """Its weight, or the tokens of the split."""
        return float(self.record(split).tokens) if self.weight is None else self.weight

    def has_scored(self, split: str, answers: bool) -> bool:
        """Whether flags for tokens of answers exist, and `answers` or conversations require them."""
        return (answers or self.is_chat) and self.record(split).scored is not None

    def scored_file(self, split: str, answers: bool) -> TokenFile | None:
        """The file of these flags, if `has_scored`."""
        return TokenFile(scored_prefix(self.prefix(split))) if self.has_scored(split, answers) else None


class Corpora:
    """The corpora of a run, all of one tokenizer. Pickled, they open nothing again.

    Opening a split raises UserError naming the key for a corpus that is missing, not prepared, or without the split;
    for token files that are missing, truncated or not Megatron's; and for corpora of different tokenizers.
    """

    def __init__(
        self, data: Data, *, validation: bool = True, verify: bool = True, markers: Sequence[Path] = ()
    ):
        """Open the train split of all stages, and the validation split if it is read (training.eval_samples > 0).

        verify: check all that data.verify asks for, which may read every file once; otherwise nothing that takes long.
        markers: folders that remember what has been verified, if a corpus is read-only.
        """
        self._data, self._verifies, self._markers = data, False, markers
        self._opened: dict[tuple[str, int], list[PreparedCorpus]] = {}
        self._manifests: dict[Path, Manifest] = {}
        self._tokenizers_verified: set[Path] = set()
        self._splits_verified: dict[tuple[Path, str], tuple[Path, Manifest]] = {}
        """Place and split -> its folder and manifest."""
        for stage in range(len(data.stages) + 1):
            self.of_split("train", stage)
        if validation:
            self.of_split("validation")
        if data.tokenizer is not None and not any(
            corpus.token_prefix for corpora in self._opened.values() for corpus in corpora
        ):
            raise UserError(
                f"data.tokenizer={data.tokenizer} is only for token files of Megatron, and prepared folders have their "
                "own; remove it"
            )
        self._add_bos = data.add_bos
        self._all_tokens_count = data.scored == "all"
        self._set_tokenizer()
        if verify:
            self.verify(markers)

    def verify(self, markers: Sequence[Path] = ()) -> None:
        """Check all that data.verify asks for, in these splits and those opened later; may read every file once."""
        self._verifies, self._markers = True, markers
        for (split, stage), corpora in self._opened.items():
            self._opened[split, stage] = self._verified(corpora, split, stage)
        for (split, stage), corpora in self._opened.items():
            # Of Megatron's files it is known only now whether documents begin with BOS.
            _check_one_tokenizer(corpora, self._data.key_of(split, stage), self.train[0])
        self._set_tokenizer()

    @property
    def train(self) -> list[PreparedCorpus]:
        """The corpora of data.train."""
        return self._opened["train", 0]

    @property
    def stages(self) -> list[list[PreparedCorpus]]:
        """The corpora of data.train, then those of each of data.stages."""
        return [self._opened["train", stage] for stage in range(len(self._data.stages) + 1)]

    def _set_tokenizer(self) -> None:
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
        of_stages = chain.from_iterable(self.stages)
        corpus = next((corpus for corpus in of_stages if corpus.is_chat), self.train[0])
        return corpus.folder / "tokenizer"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The corpora's tokenizer, with data.add_bos."""
        return tokenizers.load(self.tokenizer_folder, add_bos=self._add_bos)

    def of_split(self, split: str, stage: int = 0) -> list[PreparedCorpus]:
        """The corpora of `Data.corpora_of`; the first call opens them."""
        if (split, stage) not in self._opened:
            key = self._data.key_of(split, stage)
            corpora = [self._open(key, config, split) for config in self._data.corpora_of(split, stage)]
            first = next(iter(self._opened.values()), corpora)[0]
            _check_one_tokenizer(corpora, key, first)
            _check_one_template([*chain.from_iterable(self._opened.values()), *corpora])
            if self._verifies:  # all that is quick to check has been checked
                corpora = self._verified(corpora, split, stage)
                _check_one_tokenizer(corpora, key, first)
            self._opened[split, stage] = corpora
        return self._opened[split, stage]

    def bytes_per_token(self, split: str, stage: int = 0) -> float:
        """UTF-8 bytes of text per token, weighted by each corpus's share of the tokens; `is_text` holds.

        Bits per byte = loss / ln 2 / bytes_per_token; the loss of end-of-document tokens is charged to the text.
        """
        corpora = self.of_split(split, stage)
        total = sum(corpus.share(split) for corpus in corpora)
        return sum(
            corpus.share(split) / total * (record.bytes or 0) / record.tokens
            for corpus in corpora
            for record in [corpus.record(split)]
        )

    def is_text(self, split: str, stage: int = 0) -> bool:
        """Whether all tokens of the split count and its bytes are known, so that a causal model's loss is a code length
        of the text."""
        corpora = self.of_split(split, stage)
        are_known = all(corpus.record(split).bytes is not None for corpus in corpora)
        is_plain = not any(corpus.is_chat or corpus.manifest.pairs for corpus in corpora)
        return self._all_tokens_count and are_known and is_plain

    def bits_per_byte(self, loss: float, split: str, stage: int = 0) -> float:
        """Loss in nats per token -> bits per UTF-8 byte of the split's text, comparable across tokenizers."""
        return loss / math.log(2) / self.bytes_per_token(split, stage)

    def _open(self, key: str, config: CorpusConfig, split: str) -> PreparedCorpus:
        path = config.path
        if path not in self._manifests:
            if megatron_files.is_prefix(path):
                return self._open_token_files(key, config, split)
            self._manifests[path] = _read_manifest(key, path)
            if self._data.verify != "none" and not (path / "tokenizer").is_dir():
                raise UserError(f"{key}={path} lacks tokenizer/; {_REMEDY}")
        manifest = self._manifests[path]
        corpus = PreparedCorpus(path, config.weight, manifest)
        if split not in manifest.splits:
            remedy = "; or set training.eval_samples=0" if split == "validation" else ""
            raise UserError(f"{key}={path} has no {split} split; prepare it with one{remedy}")
        if self._data.verify != "none":
            _check_files(key, corpus, split)
        return corpus

    def _open_token_files(self, key: str, config: CorpusConfig, split: str) -> PreparedCorpus:
        """Megatron's token files; their manifest is provisional until `_verified` has made it."""
        if split not in ("train", "validation"):
            raise UserError(
                f"{key}={config.path} are token files of Megatron, which have no {split} split; prepare a folder"
            )
        if split == "validation" and self._data.validation is None:
            raise UserError(
                f"{key}={config.path} are token files of Megatron, which have no validation split; set "
                "data.validation to the prefix of others or to a prepared folder, or training.eval_samples=0"
            )
        folder, manifest = megatron_files.open_files(key, config.path, self._data, read=False)
        return PreparedCorpus(folder, config.weight, manifest, config.path)

    def _verified(self, corpora: list[PreparedCorpus], split: str, stage: int) -> list[PreparedCorpus]:
        """The corpora, read as far as data.verify asks for; token files of Megatron with their manifests."""
        key = self._data.key_of(split, stage)

        def verify(corpus: PreparedCorpus) -> tuple[Path, Manifest]:
            if corpus.token_prefix is not None:
                return megatron_files.open_files(key, corpus.token_prefix, self._data, read=True)
            if self._data.verify != "full":
                return corpus.folder, corpus.manifest
            try:
                if corpus.folder not in self._tokenizers_verified:
                    verify_tokenizer(corpus.folder, corpus.manifest, self._markers)
                    self._tokenizers_verified.add(corpus.folder)
                verify_split(corpus.folder, corpus.manifest, split, self._markers)
            except UserError as error:
                raise UserError(f"{key}={corpus.folder} {error}; {_REMEDY}") from None
            return corpus.folder, corpus.manifest

        # A corpus may be listed twice, and in several stages; it is read once.
        places = [
            (corpus.token_prefix, "") if corpus.token_prefix is not None else (corpus.folder, split)
            for corpus in corpora
        ]
        known = self._splits_verified
        unread = {place: corpus for place, corpus in zip(places, corpora) if place not in known}
        with ThreadPoolExecutor(_VERIFYING_THREADS) as threads:
            known.update(zip(unread, threads.map(verify, unread.values())))
        return [
            replace(corpus, folder=folder, manifest=manifest)
            for corpus, (folder, manifest) in zip(corpora, map(known.__getitem__, places))
        ]


def _read_manifest(key: str, path: Path) -> Manifest:
    if is_pattern(path):
        raise UserError(f"{key}={path} matches no folder of `megakernel prepare`; give one that exists")
    if path.is_dir() and not (path / FILE).is_file() and (indices := sorted(path.glob("*.idx"))):
        raise UserError(
            f"{key}={path} has no {FILE}, but token files of Megatron; give their prefix, "
            f"{indices[0].with_name(indices[0].name.removesuffix('.idx'))}"
        )
    try:
        return Manifest.read(path)
    except UserError as error:
        raise UserError(f"{key}={error}") from error


def _check_files(key: str, corpus: PreparedCorpus, split: str) -> None:
    record = corpus.record(split)
    for name, expected in corpus.manifest.files(split).items():
        file = corpus.folder / name
        try:
            size = file.stat().st_size
        except FileNotFoundError:
            raise UserError(f"{key}={corpus.folder} lacks {name}; {_REMEDY}") from None
        if size != expected.size:
            raise UserError(
                f"{key}={corpus.folder} holds a truncated or foreign {name} ({size} bytes, not "
                f"{expected.size}); {_REMEDY}"
            )
    with token_file(corpus.prefix(split), "idx").open("rb") as stream:
        header = stream.read(INDEX_HEADER.size)
    magic, _, token_type, sequences, _ = INDEX_HEADER.unpack(header.ljust(INDEX_HEADER.size))
    is_known = (
        token_type in TOKEN_TYPES and record.bin.size == TOKEN_TYPES[token_type].itemsize * record.tokens
    )
    if magic != INDEX_MAGIC or sequences != record.documents or not is_known:
        raise UserError(f"{key}={corpus.folder} holds a foreign {split}.idx; {_REMEDY}")


def _check_one_template(corpora: Iterable[PreparedCorpus]) -> None:
    chats = [corpus for corpus in corpora if corpus.is_chat]
    for first, other in pairwise(chats):
        if other.manifest.chat_template != first.manifest.chat_template:
            raise UserError(
                f"data.train: {other.folder} was prepared with another chat template than {first.folder}; prepare it "
                f"with --tokenizer {first.folder / 'tokenizer'}"
            )


def _check_one_tokenizer(corpora: Iterable[PreparedCorpus], key: str, first: PreparedCorpus) -> None:
    for corpus in corpora:
        check_same_tokenizer(
            f"{key}={corpus}", corpus.manifest.tokenizer, first, first.manifest.tokenizer, first.folder
        )
