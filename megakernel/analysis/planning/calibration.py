"""What a real run keeps, holds and takes on this machine: what predictions are measured against."""

from itertools import pairwise
from typing import Any

import torch

from data_pipeline.batch import Batch
from megakernel.config import Config
from megakernel.model import LanguageModel
from megakernel.parallel import Mesh
from megakernel.training.trainer import model_settings

from .counters import LiveBytes


def random_batch(config: Config, vocab_size: int, mesh: Mesh) -> Batch:
    """One micro-batch of this process: tokens at random, every row one document."""
    rows, length = config.training.micro_batch_size, config.training.seq_len
    generator = torch.Generator().manual_seed(mesh.dp.rank)
    tokens = torch.randint(0, vocab_size, (rows, length), generator=generator)
    counts = torch.ones(rows, length, dtype=torch.bool)
    positions = torch.arange(length).expand(rows, length).contiguous()
    return Batch(tokens, tokens.roll(-1, 1), counts, positions).piece(mesh.cp.rank, mesh.cp.size)


def kept_bytes(config: Config, vocab_size: int, mesh: Mesh) -> list[int]:
    """What forward keeps for backward, by layer of the model's list; without a pipeline."""
    model = LanguageModel(model_settings(config, mesh, vocab_size)).train()
    if config.training.dtype == "bfloat16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    batch = random_batch(config, vocab_size, mesh)
    stream: Any = (batch.tokens, batch.positions, batch.labels, torch.ones(1, dtype=torch.int64))
    with LiveBytes() as live:
        for tensor in (*model.parameters(), *model.buffers(), *stream):
            live.add(tensor)
        at = [live.now]
        for step in model.walk:
            stream = step(stream)
            at.append(live.now)
    return [after - before for before, after in pairwise(at)]
