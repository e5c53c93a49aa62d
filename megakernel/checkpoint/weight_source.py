"""What `init.from` and `objective.teacher` name: weights, and the model that they are weights of."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from data_pipeline import tokenizers
from data_pipeline.corpus import Corpora
from megakernel.config import Config, Model, UserError
from megakernel.parallel.ranks import Ranks

from .conversion import Unrounded, converted, without_updates
from .dense import DenseCheckpoint, is_dense_checkpoint
from .dense.tokenizer import has_tokenizer
from .files import CheckpointTensors
from .manifest import Checkpoint
from .trained_run import find_checkpoint, recorded_config, run_of, stage_folders, tokenizer_folder
from .universal import WholeTensors


@dataclass(frozen=True)
class WeightSource:
    """A run's checkpoint or a dense model of `transformers`, found and whole; bytes are not read yet."""

    key: str
    """The configuration key that names it."""

    folder: Path
    """What the key holds."""

    checkpoint: Checkpoint | None
    """Ours; None for a dense model."""

    @classmethod
    def find(cls, key: str, folder: Path, ranks: Ranks | None = None) -> "WeightSource":
        """What lies in a folder: a run's newest good checkpoint, a checkpoint, or a dense model.

        ranks: those that look for it together, a share of its files each; None: this process alone.
        Raises UserError, alike on all of them, where it is none of these.
        """
        ranks = ranks or Ranks()
        if ranks.first(lambda: is_dense_checkpoint(folder) and bool(DenseCheckpoint(folder))):
            return cls(key, folder, None)
        if ranks.first(lambda: (folder / "checkpoints").is_dir() or bool(stage_folders(folder))):
            return cls(key, folder, find_checkpoint(folder, ranks=ranks))
        try:
            return cls(key, folder, Checkpoint.verified(folder, ranks))
        except UserError as error:
            raise UserError(
                f"{key}={folder} is no run, no good checkpoint ({error}) and no dense model; give a folder such as "
                "runs/NAME, runs/NAME/checkpoints/step_N, or one with config.json and model.safetensors"
            ) from None

    def tensors(self, model: Model) -> WholeTensors:
        """Its weights under our names, for a model of the same sizes.

        Low-rank updates are folded, mechanisms' weights made from those of another attention, and the vocabulary of a
        dense model padded as the model's. Of what is as the run left it, AdamW's moments can be read, too.

        Raises UserError where E and F of a layer cannot become the model's.
        """
        if self.checkpoint is None:
            return DenseCheckpoint(self.folder, model.vocab_multiple)
        return converted(weights(self.checkpoint, self._config), self.model(), model)

    def model(self) -> Model:
        """The model section that its weights were trained with, rotary frequencies of their last phase included.

        Raises UserError for a checkpoint that was taken out of its run's folder.
        """
        if self.checkpoint is None:
            return DenseCheckpoint(self.folder).model
        config = self._config
        section = config.training.phase_behind(self.checkpoint.step).model(config.model)
        return section.model_copy(update={"max_positions": section.max_positions or config.training.seq_len})

    def check_tokenizer(self, corpora: Corpora) -> str | None:
        """Refuse data of another tokenizer than it has learned with: its ids would stand for other words.

        Returns a remark where it has none to compare with, or begins documents otherwise. Raises UserError for another.
        """
        source, corpus = self.folder, corpora.train[0].folder
        folder = source if has_tokenizer(source) else tokenizer_folder(run_of(source))
        if not folder.is_dir():
            return f"{source} has no tokenizer: whether {corpus} was prepared with the same one is not known"
        own = tokenizers.load(folder, own_rule=folder == source)
        if own.hash != corpora.tokenizer_hash:
            raise UserError(
                f"{self.key}={source} has another tokenizer than data.train={corpus}; prepare the data with "
                f"`megakernel prepare --tokenizer {folder}`"
            )
        if own.add_bos == (corpora.bos is not None):
            return None
        first, second = (source, corpus) if own.add_bos else (corpus, source)
        return (
            f"documents begin with BOS in {first} and not in {second}; prepare the data with "
            f"`megakernel prepare {'--add-bos' if own.add_bos else '--no-add-bos'}` to keep what the weights have "
            "learned with"
        )

    def other_vocab_size(self, vocab_size: int) -> list[str]:
        """A line if its configuration names another vocabulary size, whatever padding adds to both."""
        own = self.model().vocab_size
        if own in (None, vocab_size):  # None: as many as its tokenizer has, which is compared with the data's
            return []
        return [f"its vocabulary has {own} ids and the model's {vocab_size}"]

    @cached_property
    def _config(self) -> Config:
        assert self.checkpoint is not None
        file = self.checkpoint.folder.parents[1] / "config.yaml"
        if not file.is_file():
            raise UserError(
                f"{self.key}={self.folder} is a checkpoint without its run: {file} is missing; give the run's folder"
            )
        return recorded_config(file.parent)


def weights(checkpoint: Checkpoint, config: Config) -> WholeTensors:
    """A run's weights as another begins with them: low-rank updates folded, frozen weights as the run was given them.

    config: of the run.
    """
    own, source = CheckpointTensors(checkpoint), config.init.source
    if source is None:
        return without_updates(own, config)
    given = Unrounded(own, lambda: WeightSource.find("init.from", source).tensors(config.model))
    return without_updates(given, config)
