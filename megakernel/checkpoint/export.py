"""Export of a run's model to a folder that `transformers` loads: as a known architecture, or else as our own class."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from data_pipeline import tokenizers
from data_pipeline.partial_folder import atomic_folder, target_of
from data_pipeline.tokenizers import Tokenizer
from megakernel.config import Config, ConfigError, Model, UserError
from megakernel.config.errors import report_write_errors
from megakernel.model import LanguageModel, ModelSettings, cast
from megakernel.model.settings import DTYPES
from megakernel.parallel import OneProcess

from .dense import is_dense_checkpoint
from .dense.checkpoint import CONFIG, INDEX, ONE_FILE, model_parts, vocabulary_names
from .dense.configs import plain_config
from .dense.families import FAMILIES
from .dense.generation_settings import GENERATION_CONFIG, generation_settings
from .dense.own import OWN, own_config, own_parts
from .dense.parts import Part
from .dense.tokenizer import save_tokenizer
from .model_card import CARD, model_card
from .trained_run import TrainedRun, recorded_config, run_of, tokenizer_folder
from .weight_source import run_weights
from .whole_tensors import WEIGHT

EXPORTED_DTYPES = DTYPES | {"float16": torch.float16}


def export(
    run_folder: Path, to: Path, *, step: int | None = None, dtype: str | None = None
) -> dict[str, Any]:
    """Write safetensors, config.json, generation_config.json, README.md and the tokenizer; returns config.json.

    Args:
        run_folder: the run of a causal_lm.
        to: a folder that does not exist yet, or is empty; a failed export leaves nothing there.
        step: the checkpoint's step; None: the newest good checkpoint.
        dtype: float32, bfloat16 or float16; None: that of training.

    Raises:
        UserError: there is no run, it has another kind of model, or `to` is in use.
    """
    run = TrainedRun.find(run_folder, step)
    if not run.config.model.is_causal:
        raise UserError(
            f"model.kind={run.config.model.kind} of {run_folder} is not exported; give a run of a causal_lm"
        )
    check_unused(to)
    tokenizer = tokenizers.load(tokenizer_folder(run_folder), add_bos=run.config.data.add_bos)
    exported = _ExportedModel(run, tokenizer, EXPORTED_DTYPES[dtype or run.config.training.dtype])
    with report_write_errors("--to", to), atomic_folder(to) as folder:
        save_tokenizer(tokenizer, folder)
        config = exported.write_plain(folder) or exported.write_own(folder)
        settings = generation_config(run.config, tokenizer, exported.vocab_size)
        if config["model_type"] == OWN:
            settings.pop("cache_implementation", None)  # for KV caches; our cache is a recurrent state
        _write(folder / GENERATION_CONFIG, settings)
        step = run.checkpoint.step
        evaluation = run_folder / "evaluation" / f"step_{step}"
        described = exported.model, exported.seq_len, config["model_type"]
        card = model_card(run.config.run.name, step, *described, evaluation)
        (folder / CARD).write_text(card, encoding="utf-8")
    return config


def check_unused(to: Path) -> None:
    """Raise UserError unless `to` does not exist or is an empty folder."""
    target_of(to, "--to ")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"--to {to} is in use; name a new folder")


class _ExportedModel:
    """A run's model, with the rotary frequencies that its weights were trained with."""

    def __init__(self, run: TrainedRun, tokenizer: Tokenizer, dtype: torch.dtype):
        phase = run.config.training.last_trained_phase(run.checkpoint.step)
        self.dtype = dtype
        self.bos, self.eod = tokenizer.bos, tokenizer.eod
        # An end-of-document token that also ends chat messages does not restart positions.
        self.isolate_documents = run.config.data.isolate_documents and not tokenizer.ends_messages
        self.model = _with_positions(phase.model(run.config.model), run.config.training.seq_len)
        self.tensors = run_weights(run.checkpoint, run.config)
        self.seq_len = phase.training.seq_len
        self.vocab_size = self.model.vocab_size or tokenizer.vocab_size

    def write_plain(self, folder: Path) -> dict[str, Any] | None:
        """Write an architecture of `transformers`; None, and nothing is written, if none has the model's parts."""
        config = plain_config(self.model, self.vocab_size, self.seq_len)
        if config is None:
            return None
        config |= {
            "bos_token_id": self.bos,
            "eos_token_id": self.eod,
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        _write(folder / CONFIG, config)
        parts = model_parts(FAMILIES[config["model_type"]], self.model)
        write_tensors(folder, self._hf_tensors(parts))
        return config

    def write_own(self, folder: Path) -> dict[str, Any]:
        """Write a `MegakernelForCausalLM`."""
        from .pretrained_config import MegakernelConfig

        model = self.model.model_copy(update={"vocab_size": self.vocab_size, "vocab_multiple": 1})
        config = MegakernelConfig(
            **own_config(model),
            max_position_embeddings=self.seq_len,
            isolate_documents=self.isolate_documents,
            eos_token_id=self.eod,
            architectures=["MegakernelForCausalLM"],
            dtype=self.dtype,
        )
        settings = ModelSettings(model, self.vocab_size, OneProcess(), shapes_only=True)
        like = cast(LanguageModel(settings), self.dtype).state_dict()
        config.save_pretrained(folder)
        parts = own_parts(like, model)
        write_tensors(folder, self._own_tensors(parts, like))
        return config.to_dict()

    def _own_tensors(self, parts: dict[str, Part], like: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, part in parts.items():
            yield from zip(part.hf_names, part.split(self._read(name).to(like[name].dtype)))

    def _hf_tensors(self, parts: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        for name in sorted(parts):
            split = parts[name].split(self._read(name))
            yield from zip(parts[name].hf_names, (tensor.to(self.dtype) for tensor in split))

    def _read(self, name: str) -> Tensor:
        tensor = self.tensors.read(name, [WEIGHT])[WEIGHT]
        # Exports have no padding of the vocabulary.
        return tensor[: self.vocab_size] if name in vocabulary_names(self.model) else tensor


def _with_positions(model: Model, seq_len: int) -> Model:
    if model.max_positions is None and model.has_position_parameters:
        return model.model_copy(update={"max_positions": seq_len})
    return model


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


SHARD_BYTES = 5 * 10**9
"""Maximum size of a file, unless a single tensor is larger."""


def write_file(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file that whoever may read new files here may read; the library's are for their owner."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, {"format": "pt"})
    path.chmod(mode)


def write_tensors(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write safetensors files of at most SHARD_BYTES; one file at a time is in memory."""
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    size = total = 0

    def close() -> None:
        write_file(shard, folder / f"part-{len(shards)}")
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        count = tensor.numel() * tensor.element_size()
        if shard and size + count > SHARD_BYTES:
            close()
            size = 0
        shard[name] = tensor.contiguous()
        size, total = size + count, total + count
    close()
    if len(shards) == 1:
        (folder / "part-0").rename(folder / ONE_FILE)
        return
    weights: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / file)
        weights |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    _write(folder / INDEX, index)


def generation_config(config: Config, tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """Contents of generation_config.json for the model of a run.

    The settings are those of the dense model that the run started from, directly or through other runs, if it still
    exists; else greedy decoding, the default of `transformers`. The end-of-document token always ends a text. Token ids
    that the tokenizer does not have are suppressed.

    vocab_size: the model's.
    """
    defaults = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eod, "pad_token_id": tokenizer.eod}
    settings = {key: value for key, value in defaults.items() if value is not None} | _inherited_settings(
        config.init.source
    )
    ends = settings["eos_token_id"]
    ends = ends if isinstance(ends, list) else [ends]
    if tokenizer.eod not in ends:
        settings["eos_token_id"] = [*ends, tokenizer.eod]
    unknown = range(tokenizer.vocab_size, vocab_size)
    if unknown:
        settings["suppress_tokens"] = sorted({*settings.get("suppress_tokens", ()), *unknown})
    return settings


def _inherited_settings(source: Path | None) -> dict[str, Any]:
    """`generation_settings` of the dense model at the start of a chain of `init.from`; empty if it is not there."""
    visited: set[Path] = set()
    while source is not None and not is_dense_checkpoint(source):
        run = run_of(source.resolve())
        file = run / "config.yaml"
        if file in visited or not file.is_file():
            return {}
        visited.add(file)
        try:
            source = recorded_config(run).init.source
        except ConfigError:  # written by a version with other keys
            return {}
    return {} if source is None else generation_settings(source)
