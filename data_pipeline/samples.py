"""The endless stream of samples of text: Megatron's GPTDataset one epoch at a time.

Megatron plans a whole run at once: how it shuffles, and where it separates the last epoch, depends on the
number of samples asked for, so raising `training.steps` would reorder what comes after a restart. Here
every epoch is a GPTDataset of its own, seeded by (seed, epoch), and the blend repeats one fixed pattern.
What sample i is then depends on nothing but the corpora, the sequence length, the seed and i, and no
process has to talk to another to know it.

GPTDataset makes the indices; reading is done here, because it knows whole samples only, and a process that holds a
shard of a sequence should read that shard.
"""

import os
import re
import shutil
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from data_pipeline.blend import Blend
from data_pipeline.corpus import PreparedCorpus
from data_pipeline.packing import Packing, packing
from data_pipeline.token_files import TokenFile, scored_prefix
from megakernel.config.errors import UserError

if TYPE_CHECKING:
    from megatron.core.datasets.gpt_dataset import GPTDataset

MOST_PASSES = 10_000
"""Over a corpus, each with an index of its own: more teach nothing, and fill a disk with small files."""

_UNUSED_DAYS = 30
"""After which no start of a run has used an index and it is deleted; a run that reads it after all makes it again."""

_INDEX_NAME = re.compile(r"\w+-[0-9a-f]{16}-length\d+-seed\d+-epoch\d+(\.partial-\w+)?")


class SampleShard(NamedTuple):
    """Consecutive tokens of a sample."""

    tokens: Tensor
    """(N,) int64."""

    places: Tensor
    """(N,) int64: of each in its document, or in the sample where that begins within the document."""

    scored: Tensor | None = None
    """(N,) bool: which of them belong to answers; None where that is not asked, or not known."""


class _Plan(NamedTuple):
    """The index of one epoch, as GPTDataset has written it."""

    document_index: np.ndarray
    """Documents in the order of the epoch."""

    sample_index: np.ndarray
    """(samples + 1, 2): in which place of that order each begins, and at which token of the document."""

    shuffle_index: np.ndarray
    """Samples in the order in which they are read."""

    @classmethod
    def read(cls, folder: Path) -> "_Plan":
        """Map its arrays. UserError for what would have to be unpickled: a corpus may come with its cache."""
        arrays = []
        for name in cls._fields:
            file = next(folder.glob(f"*-{name}.npy"), folder / f"{name}.npy")
            try:
                arrays.append(np.load(file, mmap_mode="r", allow_pickle=False))
            except (OSError, ValueError, EOFError) as error:
                reason = f"{file.name} is no array of numbers: {error}"
                raise UserError(
                    f"{folder} is no index of samples ({reason}); delete it to have it made anew"
                ) from None
        return cls(*arrays)


class CorpusSamples:
    """The samples of one corpus' split, epoch after epoch, each packed and shuffled anew."""

    def __init__(
        self, corpus: PreparedCorpus, split: str, seq_len: int, seed: int, cache: Path, answers: bool = False
    ):
        """cache: folder of the indices that `build` makes. answers: read which tokens belong to answers, too.

        Of conversations they are always read. The split holds at least one sample of seq_len + 1 tokens.
        """
        self._corpus = corpus
        self._split = split
        self._seq_len = seq_len
        self._seed = seed
        self._cache = cache
        self._tokens = TokenFile(corpus.prefix(split))
        self._scored: TokenFile | None = None
        if (answers or corpus.is_chat) and corpus.record(split).scored is not None:
            self._scored = TokenFile(scored_prefix(corpus.prefix(split)))
        # A batch straddles two epochs at most, unless an epoch is shorter than a batch.
        self._epoch = lru_cache(maxsize=2)(self._opened)
        self.per_epoch = (corpus.record(split).tokens - 1) // seq_len
        self.bos = corpus.manifest.tokenizer.bos

    def build(self, samples: int) -> None:
        """Make the indices of the first `samples` samples, those that are not there yet, and delete unused ones.

        Raises UserError for more passes over the corpus than MOST_PASSES, or than the disk has room for.
        """
        passes = -(-samples // self.per_epoch)
        self._check_room(samples, passes)
        for epoch in range(passes):
            self._build(epoch)
        _delete_unused(self._cache)

    def _check_room(self, samples: int, passes: int) -> None:
        missing = sum(not self._index_folder(epoch).is_dir() for epoch in range(min(passes, MOST_PASSES)))
        needed = missing * self.index_bytes
        cache = self._cache.absolute()
        free = shutil.disk_usage(next(place for place in (cache, *cache.parents) if place.is_dir())).free
        if passes > MOST_PASSES:
            reason = f"more than the {MOST_PASSES:,} that are indexed"
        elif needed > free:
            sizes = (
                f"{needed / 1e6:,.1f} MB of data.index_cache={self._cache}, where {free / 1e6:,.1f} are free"
            )
            reason = f"whose indices take {sizes}"
        else:
            return
        raise UserError(
            f"training.steps x training.global_batch_size ask {self._corpus.folder} for {samples:,} sequences of "
            f"{self._seq_len} tokens, {passes:,} passes over it, {reason}; lower one of the two, or prepare more text"
        )

    @property
    def index_bytes(self) -> int:
        """What the index of one epoch takes on the disk, in whole blocks of its four small files at least."""
        return 4 * len(self._tokens) + 12 * self.per_epoch + 4 * 4096

    def _build(self, epoch: int) -> None:
        folder = self._index_folder(epoch)
        if folder.is_dir():
            _Plan.read(folder)  # refused now, where it cannot be read, and not at its first sequence
            with suppress(OSError):  # of a cache that is only read
                os.utime(folder)
            return
        partial = folder.with_name(
            f"{folder.name}.partial-{uuid4().hex[:8]}"
        )  # ids of processes may be a container's
        try:
            self._dataset(epoch, partial)
            partial.rename(folder)
        except OSError as error:
            # Another job that built the same index meanwhile has built the same files.
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
        """Tokens [start, end) of sample `index`, of which there are seq_len + 1; nothing else is read."""
        documents, offset = self._documents(index)
        # Places in the sequence's documents laid end to end, of which the first begins `offset` tokens before the
        # sequence.
        ends = self._tokens.sequence_lengths[documents].cumsum(dtype=np.int64)
        begins = np.concatenate([[0], ends[:-1]])
        start, end = start + offset, end + offset
        begun, ended = np.searchsorted(ends, [start, end - 1], side="right")
        parts = []
        for at in range(begun, ended + 1):
            since, until = max(start, begins[at]), min(end, ends[at])
            parts.append((documents[at], int(since - begins[at]), int(until - since)))
        tokens = torch.from_numpy(_joined(self._tokens, parts, np.int64))
        scored = None if self._scored is None else torch.from_numpy(_joined(self._scored, parts, np.bool_))
        # Not by the tokens that end documents: a chat template may write them inside of one.
        places = np.concatenate([np.arange(length) for _, _, length in parts], dtype=np.int64)
        places[: parts[0][2]] += start - max(int(begins[begun]), offset)
        return SampleShard(tokens, torch.from_numpy(places), scored)

    def _documents(self, index: int) -> tuple[np.ndarray, int]:
        """The documents that sample `index` has a part of, in order, and at which token of the first it begins."""
        epoch, row = divmod(index, self.per_epoch)
        plan = self._epoch(epoch)
        place = plan.shuffle_index[row]
        (first, offset), (last, _) = plan.sample_index[place], plan.sample_index[place + 1]
        return plan.document_index[first : last + 1], int(offset)

    def others(self, index: int, length: int, rng: np.random.Generator) -> Tensor:
        """So many tokens (length,) of documents drawn among those that sample `index` has no part of.

        Without BOS and ends. Raises UserError where the sample has a part of each.
        """
        own = set(self._documents(index)[0].tolist())
        first_token = int(self.bos is not None)
        # A document may have no token of its own.
        if not (np.delete(self._tokens.sequence_lengths, list(own)) > first_token + 1).any():
            raise UserError(
                f"{self._corpus.folder} has no document in its {self._split} split beside those of a sequence of "
                f"{self._seq_len} tokens; prepare more documents, or give shorter sequences"
            )
        parts: list[np.ndarray] = []
        missing = length
        while missing > 0:
            document = int(rng.integers(len(self._tokens)))
            size = min(int(self._tokens.sequence_lengths[document]) - first_token - 1, missing)
            if document in own or size <= 0:
                continue
            parts.append(self._tokens.get(document, offset=first_token, length=size))
            missing -= size
        return torch.from_numpy(np.concatenate(parts, dtype=np.int64))

    def packing(self) -> Packing:
        """How the documents lie in the sequences of the first epoch, whose index is built; others differ in order."""
        order = self._epoch(0).document_index
        lengths = self._tokens.sequence_lengths
        return packing(str(self._corpus.folder), lengths, order, self._seq_len, self.per_epoch)

    def _opened(self, epoch: int) -> _Plan:
        self._build(epoch)
        return _Plan.read(self._index_folder(epoch))

    def _dataset(self, epoch: int, cache: Path) -> "GPTDataset":
        # Megatron's import takes seconds, which a start that finds its indices need not wait for.
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.datasets.indexed_dataset import IndexedDataset
        from megatron.core.datasets.utils import Split

        # The content, not the place, names the index: a moved folder keeps it, one prepared anew does not.
        content = self._corpus.record(self._split).bin.sha256
        own = self._corpus.manifest.tokenizer
        # What GPTDataset asks of a tokenizer, and what names its cached indices. No id is padding: samples are never
        # padded, and GPTDataset must not take a real token for it.
        tokenizer = SimpleNamespace(
            vocab_size=own.vocab_size, eod=own.eod, pad=-1, unique_identifiers={"hash": own.hash}
        )
        config = GPTDatasetConfig(
            random_seed=int(np.random.SeedSequence([self._seed, epoch]).generate_state(1)[0]),
            sequence_length=self._seq_len,
            blend_per_split=[([content], None), None, None],
            path_to_cache=str(cache),
            tokenizer=tokenizer,
            # Masks and positions come from the tokens, in one vectorized pass over the batch.
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        documents = np.arange(len(self._tokens), dtype=np.int32)
        tokens = IndexedDataset(str(self._corpus.prefix(self._split)))
        return GPTDataset(tokens, content, documents, None, Split.train, config)

    def _index_folder(self, epoch: int) -> Path:
        content = self._corpus.record(self._split).bin.sha256[:16]
        return self._cache / f"{self._split}-{content}-length{self._seq_len}-seed{self._seed}-epoch{epoch}"


def _delete_unused(cache: Path) -> None:
    """Delete the indices of a cache that no run has begun with lately, and what interrupted ones left half made."""
    for folder in cache.glob("*-epoch*"):
        with suppress(OSError):
            age = time.time() - folder.stat().st_mtime
            if age > _UNUSED_DAYS * 86_400 and _INDEX_NAME.fullmatch(folder.name):
                shutil.rmtree(folder, ignore_errors=True)


def _joined(files: TokenFile, parts: list[tuple[int, int, int]], dtype: type[np.generic]) -> np.ndarray:
    """Stretches of documents, each (document, offset, length), one after the other."""
    found = [files.get(document, offset=offset, length=length) for document, offset, length in parts]
    return np.concatenate(found, dtype=dtype, casting="unsafe")


class BlendedSamples(Blend[Tensor]):
    """The stream of several corpora's tokens; a sample is (seq_len + 1,) int64."""

    def __init__(
        self,
        corpora: list[PreparedCorpus],
        split: str,
        seq_len: int,
        seed: int,
        cache: Path,
        keys: tuple[str, str] = ("data.train", "training.seq_len"),
        answers: bool = False,
    ):
        """keys: the configuration keys that named the corpora and the length, for errors.

        answers: read which tokens belong to answers, of the corpora that know it; of conversations always.

        Raises UserError where a corpus has too few tokens for one sample.
        """
        for corpus in corpora:
            _check_holds_a_sample(corpus, split, seq_len, keys)
        self.seq_len = seq_len
        self.corpora = [CorpusSamples(corpus, split, seq_len, seed, cache, answers) for corpus in corpora]
        super().__init__(self.corpora, [corpus.weight for corpus in corpora])

    def packing(self) -> list[Packing]:
        """How each corpus's documents lie in the sequences; the index of an epoch is built."""
        return [corpus.packing() for corpus in self.corpora]

    def read(self, index: int, start: int, end: int) -> SampleShard:
        """Tokens [start, end) of sample `index` of the stream."""
        part, place = self.locate(index)
        return self.corpora[part].read(place, start, end)


def _check_holds_a_sample(corpus: PreparedCorpus, split: str, seq_len: int, keys: tuple[str, str]) -> None:
    tokens = corpus.record(split).tokens
    if tokens < seq_len + 1:
        raise UserError(
            f"{keys[0]}={corpus.folder} has {tokens} tokens in its {split} split, one sample takes "
            f"{keys[1]} + 1 = {seq_len + 1}; prepare more text, or set {keys[1]}={tokens - 1}"
        )
