"""The endless stream of text samples: Megatron's GPTDataset, one epoch at a time.

Megatron plans a whole run at once: its shuffling, and where it separates the last epoch, depend on the number of
requested samples, so raising `training.steps` would reorder the samples after a restart. Here every epoch is a
GPTDataset of its own, seeded by (seed, epoch), and the blend does not depend on its length. Sample i therefore depends
only on the corpora, the sequence length, the seed and i, and ranks need no communication to agree on it.

GPTDataset builds the indices; reading is done here, because GPTDataset reads whole samples and a context-parallel rank
needs only its shard.
"""

import os
import re
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from data_pipeline import megatron_files
from data_pipeline.blend import Blend
from data_pipeline.corpus import PreparedCorpus
from data_pipeline.packing import Packing, pack
from data_pipeline.pairs import check_no_pairs
from data_pipeline.reading import EpochPart, Place, Reading
from data_pipeline.token_files import TokenFile, scored_prefix
from megakernel.config.data import Data
from megakernel.config.errors import UserError, existing_parent

if TYPE_CHECKING:
    from megatron.core.datasets.gpt_dataset import GPTDataset

Content = TypeVar("Content")

MAX_EPOCHS = 10_000
"""Maximum epochs of a corpus; each has its own index, and more would fill the disk with small files for no benefit."""

_UNUSED_DAYS = 30
"""An index that no run has started with for this long is deleted; a run that needs it again rebuilds it."""

_INDEX_NAME = re.compile(r"\w+-[0-9a-f]{16}-length\d+-seed\d+-epoch\d+(-samples\d+-\d+)?(\.partial-\w+)?")


class SampleShard(NamedTuple):
    """Consecutive tokens of a sample."""

    tokens: Tensor
    """(N,) int64."""

    doc_positions: Tensor
    """(N,) int64: position in the document, or in the sample if that begins inside the document."""

    scored: Tensor | None = None
    """(N,) bool: which tokens belong to answers; None if not requested or unknown."""


class _EpochIndex(NamedTuple):
    """The index of one epoch, as written by GPTDataset."""

    document_index: np.ndarray
    """Documents in the order of the epoch."""

    sample_index: np.ndarray
    """(samples + 1, 2): where each sample begins: index into `document_index`, and token of that document."""

    shuffle_index: np.ndarray
    """Samples in the order in which they are read."""

    @classmethod
    def read(cls, folder: Path) -> "_EpochIndex":
        """Memory-map its arrays. UserError if damaged, or pickled: a cache may come with a downloaded corpus.

        Raises FileNotFoundError without the folder.
        """
        names = {name.rpartition("-")[2]: name for name in os.listdir(folder)}
        return cls(
            *(_read_array(folder / names.get(f"{field}.npy", f"{field}.npy")) for field in cls._fields)
        )


_ORDER = "order.npy"
"""File of a part of an epoch: its samples, in the order in which they are read."""


def _read_order(folder: Path) -> np.ndarray:
    """Memory-map the order of a part of an epoch; errors as for `_EpochIndex.read`."""
    os.stat(folder)  # FileNotFoundError without it
    return _read_array(folder / _ORDER)


def _read_array(file: Path) -> np.ndarray:
    try:
        array: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = f"{file.name} is not an array of numbers: {error}"
        raise UserError(f"{file.parent} is not a sample index ({reason}); delete it to rebuild it") from None
    return array


def index_cache(data: Data) -> Path:
    """The folder of the indices."""
    if data.index_cache is not None:
        return data.index_cache
    first = data.train[0].path
    return (megatron_files.home(first, data) if megatron_files.is_prefix(first) else first) / ".index_cache"


class OpenFiles:
    """The mapped files of many corpora, of which only those used last stay open."""

    def __init__(self) -> None:
        most = _most_open()
        self.tokens = lru_cache(maxsize=most)(TokenFile)
        self.epochs = lru_cache(maxsize=most)(_EpochIndex.read)
        self.orders = lru_cache(maxsize=most)(_read_order)


_MOST_OPEN = 1024
"""Token files, and indices of epochs, that stay open at most: Linux maps 65,530 files."""

_HANDLES = 6
"""Of a token file (2), the index of an epoch (3) and a part of one (1): Python keeps a mapped file open."""

_BLENDS = 4
"""Streams that may be open at once: those of several sequence lengths or mixtures, and validation."""

_OTHER_HANDLES = 512
"""Libraries, sockets and pipes of a process."""


def _most_open() -> int:
    """How many files of each kind may stay open. Raises the process's limit, often 1,024, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _HANDLES * _BLENDS * _MOST_OPEN + _OTHER_HANDLES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return _MOST_OPEN
    return max(8, min(_MOST_OPEN, (soft - _OTHER_HANDLES) // (_HANDLES * _BLENDS)))


class CorpusSamples:
    """The samples of one split of a corpus, epoch after epoch, each packed and shuffled anew."""

    def __init__(
        self,
        corpus: PreparedCorpus,
        split: str,
        seq_len: int,
        seed: int,
        cache: Path,
        answers: bool = False,
        files: OpenFiles | None = None,
        reading: Reading | None = None,
    ):
        """cache: folder of the indices that `build` makes. answers: also read which tokens belong to answers.

        For conversations these are always read. The split holds at least one sample of seq_len + 1 tokens. Nothing is
        opened before a sample is read: most ranks read few of many corpora. files: shared by all corpora. reading:
        where in the epochs it reads; None: from the first on.
        """
        self._corpus = corpus
        self._split = split
        self._seq_len = seq_len
        self._seed = seed
        self._cache = cache
        self._answers = answers
        self._files = files or OpenFiles()
        self.per_epoch = samples_of(corpus, split, seq_len)
        self._reading = reading or Reading(self.per_epoch)
        self.bos = corpus.manifest.tokenizer.bos

    @property
    def _tokens(self) -> TokenFile:
        return self._files.tokens(self._corpus.prefix(self._split))

    @property
    def _scored(self) -> TokenFile | None:
        if not self._corpus.has_scored(self._split, self._answers):
            return None
        return self._files.tokens(scored_prefix(self._corpus.prefix(self._split)))

    def build(self, samples: int) -> None:
        """Build the missing indices of the first `samples` samples.

        Raises UserError if that takes more than MAX_EPOCHS epochs, or more disk space than is free.
        """
        parts = list(islice(self._reading.parts_of(samples), MAX_EPOCHS + 1))
        self._check_room(samples, parts)
        for part in parts:
            self._build(part.epoch)
            if not self._is_whole(part):
                self._build_order(part)

    def _is_whole(self, part: EpochPart) -> bool:
        return part.first == 0 and part.end == self.per_epoch

    def _check_room(self, samples: int, parts: list[EpochPart]) -> None:
        passes = -(-samples // self.per_epoch)
        missing = sum(not self._index_folder(part.epoch).is_dir() for part in parts)
        needed = missing * self.index_bytes
        free = shutil.disk_usage(existing_parent(self._cache.absolute())).free
        if len(parts) > MAX_EPOCHS:
            reason = f"more than the {MAX_EPOCHS:,} that are indexed"
        elif needed > free:
            sizes = (
                f"{needed / 1e6:,.1f} MB of data.index_cache={self._cache}, where {free / 1e6:,.1f} are free"
            )
            reason = f"whose indices take {sizes}"
        else:
            return
        raise UserError(
            f"training.steps x training.global_batch_size ask {self._corpus} for {samples:,} sequences of "
            f"{self._seq_len} tokens, {passes:,} passes over it, {reason}; lower one of the two, or prepare more text"
        )

    @property
    def index_bytes(self) -> int:
        """Disk bytes of the index of one epoch: its arrays, and a block for each of its four files."""
        return 4 * self._corpus.record(self._split).documents + 12 * self.per_epoch + 4 * 4096

    def _build(self, epoch: int) -> None:
        self._keep(self._index_folder(epoch), _EpochIndex.read, lambda partial: self._dataset(epoch, partial))

    def _build_order(self, part: EpochPart) -> None:
        """Keep the samples of a part in the order of their epoch, whose index exists."""

        def write(partial: Path) -> None:
            order = self._epoch(part.epoch).shuffle_index
            partial.mkdir(parents=True)
            np.save(partial / _ORDER, order[(order >= part.first) & (order < part.end)])

        self._keep(self._part_folder(part), _read_order, write)

    def _keep(self, folder: Path, read: Callable[[Path], object], write: Callable[[Path], object]) -> None:
        """Make a folder of the cache, which `write` makes under another name; `read` checks one that exists."""
        if folder.is_dir():
            read(folder)  # a damaged index fails now, not at its first sequence
            with suppress(OSError):  # the cache may be read-only
                os.utime(folder)
            return
        # Not a process id, which is unique only within its container.
        partial = folder.with_name(f"{folder.name}.partial-{uuid4().hex[:8]}")
        try:
            write(partial)
            partial.rename(folder)
        except OSError as error:
            # Another job may have built the same index meanwhile; its files are identical.
            if not folder.is_dir():
                raise UserError(
                    f"data.index_cache={self._cache} cannot be written ({error.strerror}); "
                    "set it to a writable folder"
                ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def __getitem__(self, index: int) -> Tensor:
        """Sample `index`: (seq_len + 1,) int64."""
        return self.read(index, 0, self._seq_len + 1).tokens

    def read(self, index: int, start: int, end: int) -> SampleShard:
        """Tokens [start, end) of sample `index`, which has seq_len + 1; reads nothing else."""
        documents, offset = self._documents(index)
        # Offsets into the sample's concatenated documents, the first of which begins `offset` tokens before the sample.
        ends = self._tokens.sequence_lengths[documents].cumsum(dtype=np.int64)
        begins = np.concatenate([[0], ends[:-1]])
        start, end = start + offset, end + offset
        first, last = np.searchsorted(ends, [start, end - 1], side="right")
        parts = []
        for at in range(first, last + 1):
            since, until = max(start, begins[at]), min(end, ends[at])
            parts.append((documents[at], int(since - begins[at]), int(until - since)))
        tokens, flags = torch.from_numpy(_concat(self._tokens, parts, np.int64)), self._scored
        scored = None if flags is None else torch.from_numpy(_concat(flags, parts, np.bool_))
        # Not from end-of-document tokens: a chat template may write them inside a document.
        doc_positions = np.concatenate([np.arange(length) for _, _, length in parts], dtype=np.int64)
        doc_positions[: parts[0][2]] += start - max(int(begins[first]), offset)
        return SampleShard(tokens, torch.from_numpy(doc_positions), scored)

    def _documents(self, index: int) -> tuple[np.ndarray, int]:
        """The documents that sample `index` overlaps, in order, and its first token's offset in the first one."""
        part, place = self._reading.locate(index)
        epoch_index = self._epoch(part.epoch)
        order = epoch_index.shuffle_index if self._is_whole(part) else self._order(part)
        sample = order[place]
        (first, offset), (last, _) = epoch_index.sample_index[sample], epoch_index.sample_index[sample + 1]
        return epoch_index.document_index[first : last + 1], int(offset)

    def foreign_tokens(self, index: int, length: int, rng: np.random.Generator) -> Tensor:
        """`length` tokens (length,) of random documents that sample `index` does not overlap.

        BOS and end-of-document are left out. Raises UserError if no other document has tokens.
        """
        own_documents = set(self._documents(index)[0].tolist())
        first_token = int(self.bos is not None)
        # A document may have no tokens besides BOS and end-of-document.
        if not (np.delete(self._tokens.sequence_lengths, list(own_documents)) > first_token + 1).any():
            raise UserError(
                f"{self._corpus} has no document in its {self._split} split other than those of a sequence of "
                f"{self._seq_len} tokens; prepare more documents, or give shorter sequences"
            )
        parts: list[np.ndarray] = []
        missing = length
        while missing > 0:
            document = int(rng.integers(len(self._tokens)))
            size = min(int(self._tokens.sequence_lengths[document]) - first_token - 1, missing)
            if document in own_documents or size <= 0:
                continue
            parts.append(self._tokens.get(document, offset=first_token, length=size))
            missing -= size
        return torch.from_numpy(np.concatenate(parts, dtype=np.int64))

    def packing(self) -> Packing:
        """Packing statistics of the first epoch that is read, whose index exists; others differ only in order."""
        order = self._epoch(self._reading.locate(0)[0].epoch).document_index
        lengths = self._tokens.sequence_lengths
        return pack(str(self._corpus), lengths, order, self._seq_len, self.per_epoch)

    def _epoch(self, epoch: int) -> _EpochIndex:
        return _read_or_build(self._files.epochs, self._index_folder(epoch), lambda: self._build(epoch))

    def _order(self, part: EpochPart) -> np.ndarray:
        return _read_or_build(self._files.orders, self._part_folder(part), lambda: self._build_order(part))

    def _dataset(self, epoch: int, cache: Path) -> "GPTDataset":
        # Importing Megatron takes seconds, which a run that finds its indices saves.
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.datasets.utils import Split

        # The index is named by content, not path: a moved folder keeps it, a re-prepared one does not.
        content = self._corpus.record(self._split).bin.sha256
        record = self._corpus.manifest.tokenizer
        # All that GPTDataset needs of a tokenizer, and the name of its cached indices. Samples are never padded, and
        # GPTDataset must not take a real token for padding, so no id is padding.
        tokenizer = SimpleNamespace(
            vocab_size=record.vocab_size, eod=record.eod, pad=-1, unique_identifiers={"hash": record.hash}
        )
        config = GPTDatasetConfig(
            random_seed=int(np.random.SeedSequence([self._seed, epoch]).generate_state(1)[0]),
            sequence_length=self._seq_len,
            blend_per_split=[([content], None), None, None],
            path_to_cache=str(cache),
            tokenizer=tokenizer,
            # Masks and positions are computed by `read` and `packed_text`.
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        documents = np.arange(len(self._tokens), dtype=np.int32)
        # All that the index is built from; IndexedDataset knows sequences only, of which a document may have several.
        lengths: Any = SimpleNamespace(sequence_lengths=self._tokens.sequence_lengths)
        return GPTDataset(lengths, content, documents, None, Split.train, config)

    def _index_folder(self, epoch: int) -> Path:
        content = self._corpus.record(self._split).bin.sha256[:16]
        return self._cache / f"{self._split}-{content}-length{self._seq_len}-seed{self._seed}-epoch{epoch}"

    def _part_folder(self, part: EpochPart) -> Path:
        whole = self._index_folder(part.epoch)
        return whole.with_name(f"{whole.name}-samples{part.first}-{part.end}")


def _read_or_build(read: Callable[[Path], Content], folder: Path, build: Callable[[], None]) -> Content:
    """What `read` finds in a folder of the cache, which `build` makes if it is missing."""
    try:
        return read(folder)
    except FileNotFoundError:
        build()
        return read(folder)


def samples_of(corpus: PreparedCorpus, split: str, seq_len: int) -> int:
    """Samples of one epoch."""
    return (corpus.record(split).tokens - 1) // seq_len


def _delete_unused(cache: Path) -> None:
    """Delete the cache's indices that no run has started with lately, and old partial ones of interrupted runs."""
    for folder in cache.glob("*-epoch*"):
        with suppress(OSError):
            age = time.time() - folder.stat().st_mtime
            if age > _UNUSED_DAYS * 86_400 and _INDEX_NAME.fullmatch(folder.name):
                shutil.rmtree(folder, ignore_errors=True)


def _concat(files: TokenFile, parts: list[tuple[int, int, int]], dtype: type[np.generic]) -> np.ndarray:
    """Spans of documents, each (document, offset, length), concatenated."""
    spans = [files.get(document, offset=offset, length=length) for document, offset, length in parts]
    return np.concatenate(spans, dtype=dtype, casting="unsafe")


class BlendedSamples(Blend[Tensor]):
    """The blended stream of several corpora; a sample is (seq_len + 1,) int64."""

    def __init__(
        self,
        corpora: list[PreparedCorpus],
        split: str,
        seq_len: int,
        seed: int,
        cache: Path,
        keys: tuple[str, str] = ("data.train", "training.seq_len"),
        answers: bool = False,
        periodic: bool = False,
        places: Sequence[Place] | None = None,
    ):
        """keys: the configuration keys of the corpora and the length, for errors.

        answers: also read which tokens belong to answers, if a corpus records it; always read for conversations.
        periodic: see `Blend`. places: where in each corpus the stream reads; None: from the start.

        Raises UserError if a corpus has too few tokens for one sample, or holds pairs.
        """
        for corpus in corpora:
            _check_holds_a_sample(corpus, split, seq_len, keys)
        check_no_pairs(corpora, keys[0])
        self.seq_len = seq_len
        files = OpenFiles()
        readings = [None] * len(corpora) if places is None else [place.reading for place in places]
        self.corpora = [
            CorpusSamples(corpus, split, seq_len, seed, cache, answers, files, reading)
            for corpus, reading in zip(corpora, readings)
        ]
        starts = None if places is None else [place.start for place in places]
        self._cache = cache
        super().__init__(self.corpora, [corpus.share(split) for corpus in corpora], periodic, starts)

    def build(self, samples: int) -> None:
        """Build what reading the first `samples` samples needs, unless it exists, and delete unused indices.

        Raises UserError as `CorpusSamples.build` does.
        """
        super().build(samples)
        _delete_unused(self._cache)  # once, not for each corpus: it looks at the indices of all

    def packing(self) -> list[Packing]:
        """Packing statistics of each corpus; the index of the first epoch exists."""
        return [corpus.packing() for corpus in self.corpora]

    def read(self, index: int, start: int, end: int) -> SampleShard:
        """Tokens [start, end) of sample `index` of the stream."""
        corpus, sample = self.locate(index)
        return self.corpora[corpus].read(sample, start, end)


def _check_holds_a_sample(corpus: PreparedCorpus, split: str, seq_len: int, keys: tuple[str, str]) -> None:
    tokens = corpus.record(split).tokens
    if tokens < seq_len + 1:
        instead = (
            " or training.eval_samples=0" if split == "validation" and keys[1].startswith("training.") else ""
        )
        raise UserError(
            f"{keys[0]}={corpus} has {tokens} tokens in its {split} split, one sample takes "
            f"{keys[1]} + 1 = {seq_len + 1}; prepare more text, or set {keys[1]}={tokens - 1}{instead}"
        )
