"""A run's model as a folder that `transformers` loads: a plain architecture where one fits, else our own class."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from data_pipeline import tokenizers
from data_pipeline.prepare import appearing_whole
from data_pipeline.tokenizers import Tokenizer
from megakernel.config import Config, ConfigError, Model, UserError
from megakernel.config.errors import written_to
from megakernel.model import cast
from megakernel.model.settings import DTYPES

from .dense import is_dense_checkpoint
from .dense.checkpoint import CONFIG, INDEX, ONE_FILE, our_parts, vocabulary_names
from .dense.configs import plain_config
from .dense.families import FAMILIES, OWN
from .dense.tokenizer import save_tokenizer
from .model_card import CARD, model_card
from .trained_run import TrainedRun, recorded_config, run_of, tokenizer_folder
from .universal import WEIGHT
from .weight_source import weights

EXPORTED_DTYPES = DTYPES | {"float16": torch.float16}


def export(
    run_folder: Path, to: Path, *, step: int | None = None, dtype: str | None = None
) -> dict[str, Any]:
    """Write safetensors, config.json, generation_config.json, README.md and the tokenizer; returns config.json.

    Args:
        run_folder: of a causal_lm.
        to: a folder that does not exist yet, or is empty; nothing is left there where the export fails.
        step: which checkpoint; None takes the newest good one.
        dtype: float32, bfloat16 or float16; None takes that of training.

    Raises:
        UserError: no run, another kind of model, a folder that is in use.
    """
    run = TrainedRun.find(run_folder, step)
    if not run.config.model.is_causal:
        raise UserError(
            f"model.kind={run.config.model.kind} of {run_folder} is not exported; give a run of a causal_lm"
        )
    check_unused(to)
    tokenizer = tokenizers.load(tokenizer_folder(run_folder), add_bos=run.config.data.add_bos)
    source = _Source(run, tokenizer, EXPORTED_DTYPES[dtype or run.config.training.dtype])
    with written_to("--to", to), appearing_whole(to) as folder:
        save_tokenizer(tokenizer, folder)
        config = source.write_plain(folder) or source.write_own(folder)
        settings = generation_config(run.config, tokenizer, source.vocab_size)
        if config["model_type"] == OWN:
            settings.pop("cache_implementation", None)  # of keys and values, of which its state is none
        _write(folder / FILE, settings)
        step = run.checkpoint.step
        measured = run_folder / "evaluation" / f"step_{step}"
        named = run.config.run.name, step, source.model, source.seq_len, config["model_type"]
        (folder / CARD).write_text(model_card(*named, measured), encoding="utf-8")
    return config


def check_unused(to: Path) -> None:
    """UserError unless nothing is there, or an empty folder."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"--to {to} is in use; name a new folder")


class _Source:
    """A run's model, with the rotary frequencies that its weights know."""

    def __init__(self, run: TrainedRun, tokenizer: Tokenizer, dtype: torch.dtype):
        phase = run.config.training.phase_behind(run.checkpoint.step)
        self.dtype = dtype
        self.bos, self.eod = tokenizer.bos, tokenizer.eod
        # What also ends messages does not say where positions begin again.
        self.isolates = run.config.data.isolate_documents and not tokenizer.ends_messages
        self.model = _with_positions(phase.model(run.config.model), run.config.training.seq_len)
        self.tensors = weights(run.checkpoint, run.config)
        self.seq_len = phase.training.seq_len
        self.vocab_size = self.model.vocab_size or tokenizer.vocab_size

    def write_plain(self, folder: Path) -> dict[str, Any] | None:
        """As an architecture of `transformers`; None, with nothing written, where none has the model's parts."""
        config = plain_config(self.model, self.vocab_size, self.seq_len)
        if config is None:
            return None
        config |= {
            "bos_token_id": self.bos,
            "eos_token_id": self.eod,
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        _write(folder / CONFIG, config)
        parts = our_parts(FAMILIES[config["model_type"]], self.model)
        write_tensors(folder, self._theirs(parts))
        return config

    def write_own(self, folder: Path) -> dict[str, Any]:
        """As `MegakernelForCausalLM`."""
        from .pretrained_config import MegakernelConfig

        config = MegakernelConfig(
            model=self.model.model_dump(mode="json"),
            vocab_size=self.vocab_size,
            max_position_embeddings=self.seq_len,
            isolate_documents=self.isolates,
            eos_token_id=self.eod,
            architectures=["MegakernelForCausalLM"],
            dtype=self.dtype,
        )
        like = cast(config.language_model(shapes_only=True), self.dtype).state_dict()
        config.save_pretrained(folder)
        write_tensors(folder, ((f"model.{name}", self._read(name).to(x.dtype)) for name, x in like.items()))
        return config.to_dict()

    def _theirs(self, parts: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        for name in sorted(parts):
            split = parts[name].split(self._read(name))
            yield from zip(parts[name].hf_names, (tensor.to(self.dtype) for tensor in split))

    def _read(self, name: str) -> Tensor:
        tensor = self.tensors.read(name, [WEIGHT])[WEIGHT]
        # Rows that pad the vocabulary stay here.
        return tensor[: self.vocab_size] if name in vocabulary_names(self.model) else tensor


def _with_positions(model: Model, seq_len: int) -> Model:
    if model.max_positions is None and model.counts_positions:
        return model.model_copy(update={"max_positions": seq_len})
    return model


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


SHARD_BYTES = 5 * 10**9
"""Of one file, at most, unless a tensor is larger."""


def write_tensors(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write files of at most SHARD_BYTES, holding one at a time in memory."""
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    size = total = 0

    def close() -> None:
        save_file(shard, folder / f"part-{len(shards)}", {"format": "pt"})
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


FILE = "generation_config.json"

_MADE = "_from_model_config"
"""Marks a file that `transformers` made of config.json: nobody chose what it says."""


def generation_config(config: Config, tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """Its keys, for the model of a run.

    Those of the dense model that the run began with, directly or through other runs, as long as they are still there;
    of any other model greedy decoding, the default of `transformers`. A document's end always ends a text. Words of the
    model that its tokenizer does not know are never chosen.

    vocab_size: of the model.
    """
    own = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eod, "pad_token_id": tokenizer.eod}
    settings = {key: value for key, value in own.items() if value is not None} | _given(config.init.source)
    ends = settings["eos_token_id"]
    ends = ends if isinstance(ends, list) else [ends]
    if tokenizer.eod not in ends:
        settings["eos_token_id"] = [*ends, tokenizer.eod]
    unknown = range(tokenizer.vocab_size, vocab_size)
    if unknown:
        settings["suppress_tokens"] = sorted({*settings.get("suppress_tokens", ()), *unknown})
    return settings


def _given(source: Path | None) -> dict[str, Any]:
    """What the user chose for the dense model where a chain of `init.from` begins."""
    passed: set[Path] = set()
    while source is not None and not is_dense_checkpoint(source):
        run = run_of(source.resolve())
        file = run / "config.yaml"
        if file in passed or not file.is_file():
            return {}
        passed.add(file)
        try:
            source = recorded_config(run).init.source
        except ConfigError:  # of a version that knew other keys
            return {}
    if source is None or not (source / FILE).is_file():
        return {}
    try:
        given = json.loads((source / FILE).read_text(encoding="utf-8"))
        if not isinstance(given, dict):
            raise ValueError(f"a {type(given).__name__}")
    except ValueError as error:
        raise UserError(
            f"{source / FILE} is no JSON object ({error}); download it again, or remove it"
        ) from None
    if given.pop(_MADE, False):
        return {}
    return {key: value for key, value in given.items() if value is not None and key != "transformers_version"}
