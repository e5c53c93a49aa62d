"""What commands take for a trained model: a run's checkpoint, or a folder that `transformers` loads."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline import tokenizers
from data_pipeline.tokenizers import Tokenizer
from megakernel.config import Config, Corpus, Data, Run, Training, UserError
from megakernel.parallel.device import choose_device

from .trained_run import TrainedRun, tokenizer_folder

if TYPE_CHECKING:
    import torch

    from megakernel.model import LanguageModel

ROW = 2048
"""Tokens of a sample of a folder's model where nothing else is said, or fewer, as its config.json has it."""


@dataclass(frozen=True)
class OpenedModel:
    """A model that was found and is whole; its weights are not read yet."""

    folder: Path
    """The run's, or the one in the Hugging Face form."""

    run: TrainedRun | None
    """None for a folder in the Hugging Face form."""

    config: Config
    """What the run was trained with; of a folder its model section, and values of a run that reads `data`."""

    tokenizer: Tokenizer

    @property
    def step(self) -> int:
        """The checkpoint's; 0 for a folder."""
        return 0 if self.run is None else self.run.checkpoint.step

    def check_continues_text(self) -> None:
        """UserError for an encoder."""
        if not self.config.model.is_causal:
            raise UserError(
                f"model.kind={self.config.model.kind} of {self.folder} continues no text; give a run of a causal_lm"
            )

    def load(self) -> tuple["LanguageModel", "torch.device"]:
        """The whole model in evaluation mode, in the dtype of training or of the files, and the device it is on."""
        from .one_process import dense_model, one_process_model

        device = choose_device("cpu" if self.config.training.device == "cpu" else "auto")
        if self.run is None:
            return dense_model(self.folder, self.config, self.tokenizer.vocab_size, device), device
        return one_process_model(self.run, self.tokenizer.vocab_size, device), device

    @property
    def ends(self) -> frozenset[int]:
        """Ids that end a text: the tokenizer's, and those of the model's generation_config.json."""
        if self.run is None:
            from .dense.checkpoint import json_object

            given = json_object(self.folder / "generation_config.json").get("eos_token_id")
        else:
            from .export import generation_config

            size = self.config.model.vocab_size or self.tokenizer.vocab_size
            given = generation_config(self.config, self.tokenizer, size)["eos_token_id"]
        named = given if isinstance(given, list) else [given]
        return frozenset({self.tokenizer.eod, *(one for one in named if isinstance(one, int))})


def find(folder: Path, step: int | None = None, *, data: Path | None = None) -> OpenedModel:
    """The model of a run at a step, or at its newest good checkpoint, or of a folder in the Hugging Face form.

    data: a prepared folder to read in place of the run's; a folder in the Hugging Face form has none of its own.
    Raises UserError: none of both, no such checkpoint, a family that is not known, no tokenizer.
    """
    if not (folder / "config.yaml").is_file() and (folder / "config.json").is_file():
        if step is not None:
            raise UserError(f"--step {step}: {folder} is no run and has one set of weights; leave it out")
        return OpenedModel(folder, None, _configuration(folder, data), _tokenizer(folder))
    run = TrainedRun.find(folder, step)
    config = run.config
    if data is not None:
        read = Data.model_validate({**config.data.model_dump(), "train": data, "validation": None})
        config = config.model_copy(update={"data": read})
    tokenizer = tokenizers.load(tokenizer_folder(folder), add_bos=config.data.add_bos)
    return OpenedModel(folder, run, config, tokenizer)


def _configuration(folder: Path, data: Path | None) -> Config:
    from .dense import DenseCheckpoint
    from .dense.families import OWN

    checkpoint = DenseCheckpoint(folder)
    written, model = checkpoint.config, checkpoint.model
    positions = model.max_positions if model.counts_positions else None
    longest = written.get("max_position_embeddings") or written.get("n_positions") or ROW
    own = written["model_type"] == OWN
    # Not validated: it describes no run, and `data` is looked at where it is read.
    return Config.model_construct(
        run=Run.model_construct(name=folder.name, root=folder.parent),
        model=model,
        data=Data(
            train=[Corpus(path=folder if data is None else data)],
            # Models of `transformers` know no documents: what stands behind their end goes on.
            isolate_documents=bool(written.get("isolate_documents", True)) if own else False,
        ),
        training=Training(
            steps=1,
            seq_len=min(positions or ROW, longest, ROW),
            global_batch_size=1,
            dtype="bfloat16" if str(written.get("dtype")).endswith("bfloat16") else "float32",
        ),
    )


def _tokenizer(folder: Path) -> Tokenizer:
    from .dense.tokenizer import has_tokenizer

    if not has_tokenizer(folder):
        raise UserError(
            f"{folder} has no tokenizer; copy tokenizer.json and tokenizer_config.json of its model into it"
        )
    return tokenizers.load(folder, own_rule=True)
