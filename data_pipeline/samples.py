"""The endless stream of samples of text: Megatron's GPTDataset one epoch at a time.

Megatron plans a whole run at once: how it shuffles, and where it separates the last epoch, depends on the
number of samples asked for, so raising `training.steps` would reorder what comes after a restart. Here
every epoch is a GPTDataset of its own, seeded by (seed, epoch), and the blend repeats one fixed pattern.
What sample i is then depends on nothing but the corpora, the sequence length, the seed and i, and no
process has to talk to another to know it.
"""

import os
import shutil
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from torch import Tensor

from data_pipeline.blend import Blend
from data_pipeline.corpus import PreparedCorpus
from megakernel.config.errors import UserError

_OPEN_EPOCHS = 2
"""A batch straddles two epochs at most, unless an epoch is shorter than a batch."""


class _TokenizerFacts:
    """What GPTDataset asks of a tokenizer, and what names its cached indices."""

    def __init__(self, corpus: PreparedCorpus):
        self.vocab_size = corpus.manifest.tokenizer.vocab_size
        self.eod = corpus.manifest.tokenizer.eod
        # No id: samples are never padded, and GPTDataset must not take a real token for padding.
        self.pad = -1
        self.unique_identifiers = {"hash": corpus.manifest.tokenizer.hash}


class CorpusSamples:
    """The samples of one corpus' split, epoch after epoch, each packed and shuffled anew."""

    def __init__(self, corpus: PreparedCorpus, split: str, seq_len: int, seed: int, cache: Path):
        """cache: folder of the indices that `build` makes.

        The split holds at least one sample of seq_len + 1 tokens.
        """
        self._corpus = corpus
        self._split = split
        self._seq_len = seq_len
        self._seed = seed
        self._cache = cache
        self._tokens = IndexedDataset(str(corpus.prefix(split)))
        self._epochs: OrderedDict[int, GPTDataset] = OrderedDict()
        self.per_epoch = (corpus.record(split).tokens - 1) // seq_len

    def build(self, samples: int) -> None:
        """Make the indices of the first `samples` samples, those that are not there yet."""
        for epoch in range(-(-samples // self.per_epoch)):
            folder = self._index_folder(epoch)
            if folder.is_dir():
                continue
            partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
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
        epoch, row = divmod(index, self.per_epoch)
        sample = self._epoch(epoch)[row]
        return torch.cat([sample["tokens"], sample["labels"][-1:]])

    def _epoch(self, epoch: int) -> GPTDataset:
        if epoch not in self._epochs:
            while len(self._epochs) >= _OPEN_EPOCHS:
                self._epochs.popitem(last=False)
            self._epochs[epoch] = self._dataset(epoch, self._index_folder(epoch))
        return self._epochs[epoch]

    def _dataset(self, epoch: int, cache: Path) -> GPTDataset:
        # The content, not the place, names the index: a moved folder keeps it, one prepared anew does not.
        content = self._corpus.record(self._split).bin.sha256
        config = GPTDatasetConfig(
            random_seed=int(np.random.SeedSequence([self._seed, epoch]).generate_state(1)[0]),
            sequence_length=self._seq_len,
            blend_per_split=[([content], None), None, None],
            path_to_cache=str(cache),
            tokenizer=_TokenizerFacts(self._corpus),
            # Masks and positions come from the tokens, in one vectorized pass over the batch.
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        documents = np.arange(len(self._tokens), dtype=np.int32)
        return GPTDataset(self._tokens, content, documents, None, Split.train, config)

    def _index_folder(self, epoch: int) -> Path:
        content = self._corpus.record(self._split).bin.sha256[:16]
        return self._cache / f"{self._split}-{content}-length{self._seq_len}-seed{self._seed}-epoch{epoch}"


class BlendedSamples(Blend[Tensor]):
    """The stream of several corpora's tokens; a sample is (seq_len + 1,) int64."""

    def __init__(
        self, corpora: list[PreparedCorpus], split: str, seq_len: int, seed: int, cache: Path, key: str
    ):
        """key: the configuration key that named the corpora, for errors.

        Raises UserError where a corpus has too few tokens for one sample.
        """
        for corpus in corpora:
            _check_holds_a_sample(corpus, split, seq_len, key)
        parts = [CorpusSamples(corpus, split, seq_len, seed, cache) for corpus in corpora]
        super().__init__(parts, [corpus.weight for corpus in corpora])


def _check_holds_a_sample(corpus: PreparedCorpus, split: str, seq_len: int, key: str) -> None:
    tokens = corpus.record(split).tokens
    if tokens < seq_len + 1:
        raise UserError(
            f"{key}={corpus.folder} has {tokens} tokens in its {split} split, one sample takes "
            f"training.seq_len + 1 = {seq_len + 1}; prepare more text, or set training.seq_len={tokens - 1}"
        )
