"""The weights and the model that `init.from` or `objective.teacher` names."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from data_pipeline import tokenizers
from data_pipeline.corpus import Corpora
from megakernel.config import Config, Model, UserError
from megakernel.parallel.ranks import Ranks

from .conversion import Unrounded, convert_attention, without_updates
from .dense import DenseCheckpoint, is_dense_checkpoint
from .dense.tokenizer import has_tokenizer
from .files import CheckpointTensors
from .manifest import SavedCheckpoint
from .trained_run import find_checkpoint, recorded_config, run_of, stage_folders, tokenizer_folder
from .whole_tensors import WholeTensors


@dataclass(frozen=True)
class WeightSource:
    """A run's checkpoint or a dense model of `transformers`, complete; tensors are not read yet."""

    key: str
    """The configuration key that names it, for error messages."""

    folder: Path
    """The value of the key."""

    checkpoint: SavedCheckpoint | None
    """The run's checkpoint; None for a dense model."""

    @classmethod
    def find(cls, key: str, folder: Path, ranks: Ranks | None = None) -> "WeightSource":
        """Find a run's newest good checkpoint, a checkpoint, or a dense model in a folder.

        ranks: the ranks that verify it together, a share of its files each; None: only this process.
        Raises UserError, alike on all of them, if it is none of these.
        """
        ranks = ranks or Ranks()
        if ranks.on_rank_zero(lambda: is_dense_checkpoint(folder) and bool(DenseCheckpoint(folder))):
            return cls(key, folder, None)
        if ranks.on_rank_zero(lambda: (folder / "checkpoints").is_dir() or bool(stage_folders(folder))):
            return cls(key, folder, find_checkpoint(folder, ranks=ranks))
        try:
            return cls(key, folder, SavedCheckpoint.verified(folder, ranks))
        except UserError as error:
            raise UserError(
                f"{key}={folder} is no run, no good checkpoint ({error}) and no dense model; give a folder such as "
                "runs/NAME, runs/NAME/checkpoints/step_N, or one with config.json and model.safetensors"
            ) from None

    def tensors(self, model: Model, ranks: Ranks | None = None) -> WholeTensors:
        """Its weights under our names, converted for a model of the same sizes.

        ranks: the ranks that open them together, as those of `CheckpointTensors`.

        Low-rank updates are folded, weights of other attention mechanisms converted, and the vocabulary of a dense
        model padded like the model's. Unchanged tensors of a run also have AdamW's moments.

        Raises UserError if a layer's E and F cannot be converted.
        """
        if self.checkpoint is None:
            return DenseCheckpoint(self.folder, model.vocab_multiple)
        return convert_attention(run_weights(self.checkpoint, self._config, ranks), self.model(), model)

    def model(self) -> Model:
        """The model section that its weights were trained with, with the rotary frequencies of their last phase.

        Raises UserError for a checkpoint outside of its run's folder.
        """
        if self.checkpoint is None:
            return DenseCheckpoint(self.folder).model
        config = self._config
        section = config.training.last_trained_phase(self.checkpoint.step).model(config.model)
        return section.model_copy(update={"max_positions": section.max_positions or config.training.seq_len})

    def check_tokenizer(self, corpora: Corpora) -> str | None:
        """Raise UserError if the data has another tokenizer than the weights were trained with.

        Returns a warning if the source has no tokenizer to compare with, or if only one of them starts documents with
        BOS.
        """
        source, corpus = self.folder, corpora.train[0]
        folder = source if has_tokenizer(source) else tokenizer_folder(run_of(source))
        if not folder.is_dir():
            return f"{source} has no tokenizer: whether {corpus} was prepared with the same one is not known"
        tokenizer = tokenizers.load(folder, own_rule=folder == source)
        if tokenizer.hash != corpora.tokenizer_hash:
            raise UserError(
                f"{self.key}={source} has another tokenizer than data.train={corpus}; prepare the data with "
                f"`megakernel prepare --tokenizer {folder}`"
            )
        if tokenizer.add_bos == (corpora.bos is not None):
            return None
        first, second = (source, corpus) if tokenizer.add_bos else (corpus, source)
        return (
            f"documents begin with BOS in {first} and not in {second}; prepare the data with "
            f"`megakernel prepare {'--add-bos' if tokenizer.add_bos else '--no-add-bos'}` to keep what the weights "
            "were trained with"
        )

    def vocab_size_mismatch(self, vocab_size: int) -> list[str]:
        """A message, in a list, if its vocabulary size without padding differs; else an empty list."""
        known_size = self.model().vocab_size
        if known_size in (None, vocab_size):  # None: that of its tokenizer, which `check_tokenizer` compares
            return []
        return [f"its vocabulary has {known_size} ids and the model's {vocab_size}"]

    @property
    def optimizer(self) -> str:
        """optimizer.name of its run."""
        return self._config.optimizer.name

    @cached_property
    def _config(self) -> Config:
        assert self.checkpoint is not None
        file = self.checkpoint.folder.parents[1] / "config.yaml"
        if not file.is_file():
            raise UserError(
                f"{self.key}={self.folder} is a checkpoint without its run: {file} is missing; give the run's folder"
            )
        return recorded_config(file.parent)


def run_weights(checkpoint: SavedCheckpoint, config: Config, ranks: Ranks | None = None) -> WholeTensors:
    """A run's weights with low-rank updates folded, and frozen weights as precise as the run received them.

    config: that of the run. ranks: as those of `CheckpointTensors`.
    """
    stored, source = CheckpointTensors(checkpoint, ranks), config.init.source
    if source is None:
        return without_updates(stored, config)
    unrounded = Unrounded(stored, lambda: WeightSource.find("init.from", source).tensors(config.model))
    return without_updates(unrounded, config)
