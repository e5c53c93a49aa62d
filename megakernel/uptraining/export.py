"""A run's softmax model as a folder that `transformers` loads without Megakernel."""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from data_pipeline import tokenizers
from megakernel.config import Config, UserError
from megakernel.training.checkpoint_files import CheckpointTensors
from megakernel.training.run_folder import tokenizer_folder
from megakernel.training.trained_run import TrainedRun
from megakernel.training.universal import WEIGHT

from .dense.checkpoint import CONFIG, INDEX, ONE_FILE, embedding_name, our_parts
from .dense.configs import plain_config
from .dense.families import FAMILIES
from .dense.tokenizer import save_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHARD_BYTES = 5 * 10**9
"""Of one safetensors file, at most, unless a tensor is larger."""


def export(
    run_folder: Path, to: Path, *, step: int | None = None, dtype: str | None = None
) -> dict[str, Any]:
    """Write safetensors, config.json, generation_config.json and the tokenizer; returns config.json.

    Args:
        run_folder: of a causal model with softmax attention in every layer.
        to: a folder that does not exist yet, or is empty; nothing is left there where the export fails.
        step: which checkpoint; None takes the newest good one.
        dtype: float32, bfloat16 or float16; None takes that of training.

    Raises:
        UserError: no run, a model that no plain architecture has, a folder that is in use.
    """
    run = TrainedRun.find(run_folder, step)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"--to {to} is in use; name a new folder")
    tensors = CheckpointTensors(run.checkpoint)
    config = _configuration(run.config, tensors)
    target = DTYPES[dtype or run.config.training.dtype]
    config["dtype"] = str(target).removeprefix("torch.")
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{to.name}-", dir=to.parent) as partial:
        folder = Path(partial) / "model"
        folder.mkdir()
        tokenizer = tokenizers.load(tokenizer_folder(run_folder))
        save_tokenizer(tokenizer, folder)
        _write(folder / CONFIG, config | {"eos_token_id": tokenizer.eod})
        _write(folder / "generation_config.json", {"eos_token_id": tokenizer.eod, "do_sample": True})
        parts = our_parts(FAMILIES[config["model_type"]], run.config.model)
        _save(
            folder,
            ((x, y.to(target)) for name in sorted(parts) for x, y in _theirs(tensors, name, parts[name])),
        )
        if to.exists():
            to.rmdir()
        os.replace(folder, to)
    return config


def _configuration(config: Config, tensors: CheckpointTensors) -> dict[str, Any]:
    model = config.model
    kinds = {model.layer_attention(layer).similarity for layer in range(model.num_layers)}
    plain = all(
        model.layer_attention(layer) == model.layer_attention(layer).model_validate({"similarity": "softmax"})
        for layer in range(model.num_layers)
    )
    if not model.is_causal or not plain:
        raise UserError(
            f"model.kind={model.kind} with {', '.join(sorted(map(str, kinds)))} attention has no plain architecture; "
            "only a causal_lm with softmax in every layer is exported so far"
        )
    rows, _ = tensors.shape(embedding_name(model))
    return plain_config(model, rows, config.training.seq_len)


def _theirs(tensors: CheckpointTensors, name: str, part: Any) -> Iterator[tuple[str, Tensor]]:
    return zip(part.theirs, part.split(tensors.read(name, [WEIGHT])[WEIGHT]))


def _save(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
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
    _write(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weights})


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
