"""Tensors as safetensors, in one file or in several with an index, as `transformers` reads them."""

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from .dense.checkpoint import INDEX, ONE_FILE

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
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
