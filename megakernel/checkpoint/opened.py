"""A trained model that commands accept: a run's checkpoint, or a folder that `transformers` loads."""

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

DEFAULT_SEQ_LEN = 2048
"""Default tokens per sample for a Hugging Face folder; fewer if its config.json has a smaller maximum."""


@dataclass(frozen=True)
class OpenedModel:
    """A model whose files are complete; its weights are not read yet."""

    folder: Path
    """The run's folder or the Hugging Face folder."""

    run: TrainedRun | None
    """None for a Hugging Face folder."""

    config: Config
    """The run's configuration; for a Hugging Face folder its model section with placeholders for the other sections."""

    tokenizer: Tokenizer

    @property
    def step(self) -> int:
        """The checkpoint's step; 0 for a Hugging Face folder."""
        return 0 if self.run is None else self.run.checkpoint.step

    def check_continues_text(self) -> None:
        """Raise UserError for an encoder."""
        if not self.config.model.is_causal:
            raise UserError(
                f"model.kind={self.config.model.kind} of {self.folder} does not continue text; give a run of a "
                "causal_lm"
            )

    def load(self) -> tuple["LanguageModel", "torch.device"]:
        """Return the whole model, in evaluation mode and the dtype of training or of the files, and its device."""
        from .one_process import dense_model, one_process_model

        device = choose_device("cpu" if self.config.training.device == "cpu" else "auto")
        if self.run is None:
            return dense_model(self.folder, self.config, self.tokenizer.vocab_size, device), device
        return one_process_model(self.run, self.tokenizer.vocab_size, device), device

    @property
    def ends(self) -> frozenset[int]:
        """Token ids that end a text: the tokenizer's, and those that the files of its dense model name."""
        if self.run is None:
            from .dense.generation_settings import generation_settings

            eos = generation_settings(self.folder).get("eos_token_id")
        else:
            from .export import generation_config

            size = self.config.model.vocab_size or self.tokenizer.vocab_size
            eos = generation_config(self.config, self.tokenizer, size)["eos_token_id"]
        ids = eos if isinstance(eos, list) else [eos]
        return frozenset({self.tokenizer.eod, *(end for end in ids if isinstance(end, int))})


def find_model(folder: Path, step: int | None = None, *, data: Path | None = None) -> OpenedModel:
    """Find the model of a run, at a step or its newest good checkpoint, or of a Hugging Face folder.

    data: a prepared folder to read instead of the run's; a Hugging Face folder has none of its own.
    Raises UserError if the folder is neither, or has no such checkpoint, an unknown family or no tokenizer.
    """
    if not (folder / "config.yaml").is_file() and (folder / "config.json").is_file():
        if step is not None:
            raise UserError(f"--step {step}: {folder} is no run and has one set of weights; leave it out")
        return OpenedModel(folder, None, _folder_config(folder, data), _tokenizer(folder))
    run = TrainedRun.find(folder, step)
    config = run.config
    if data is not None:
        read = Data.model_validate({**config.data.model_dump(), "train": data, "validation": None})
        config = config.model_copy(update={"data": read})
    tokenizer = tokenizers.load(tokenizer_folder(folder), add_bos=config.data.add_bos)
    return OpenedModel(folder, run, config, tokenizer)


def _folder_config(folder: Path, data: Path | None) -> Config:
    from .dense import DenseCheckpoint
    from .dense.own import OWN

    checkpoint = DenseCheckpoint(folder)
    written, model = checkpoint.config, checkpoint.model
    positions = model.max_positions if model.has_position_parameters else None
    longest = written.get("max_position_embeddings") or written.get("n_positions") or DEFAULT_SEQ_LEN
    is_own = written["model_type"] == OWN
    # Not validated, because it describes no run; `data` is checked when it is read.
    return Config.model_construct(
        run=Run.model_construct(name=folder.name, root=folder.parent),
        model=model,
        data=Data(
            train=[Corpus(path=folder if data is None else data)],
            # Models of `transformers` do not isolate documents.
            isolate_documents=bool(written.get("isolate_documents", True)) if is_own else False,
        ),
        training=Training(
            steps=1,
            seq_len=min(positions or DEFAULT_SEQ_LEN, longest, DEFAULT_SEQ_LEN),
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
