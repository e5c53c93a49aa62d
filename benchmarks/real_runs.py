"""Bytes that a real run saves for backward, holds and sends on this machine, for comparison with plans."""

import gc
import time
from collections import Counter
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from data_pipeline.batch import Batch
from megakernel.analysis.planning.ledger import Ledger
from megakernel.config import Config
from megakernel.model import LanguageModel
from megakernel.model.settings import model_settings
from megakernel.parallel import Mesh
from megakernel.training.engine import Engine


def random_batch(config: Config, vocab_size: int, mesh: Mesh) -> Batch:
    """One micro-batch of this process: random tokens, every sequence one document."""
    rows, length = config.training.micro_batch_size, config.training.seq_len
    generator = torch.Generator().manual_seed(mesh.dp.rank)
    tokens = torch.randint(0, vocab_size, (rows, length), generator=generator)
    counts = torch.ones(rows, length, dtype=torch.bool)
    positions = torch.arange(length).expand(rows, length).contiguous()
    whole = (tokens, tokens.roll(-1, 1), counts, positions)
    return Batch(*(x.chunk(mesh.cp.size, 1)[mesh.cp.rank] for x in whole))


def saved_activations(config: Config, vocab_size: int, mesh: Mesh) -> list[int]:
    """Bytes of saved activations of each layer in the model's list, without a pipeline."""
    model = LanguageModel(model_settings(config, mesh, vocab_size)).train()
    if config.training.dtype == "bfloat16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    batch = random_batch(config, vocab_size, mesh)
    inputs: Any = (batch.tokens, batch.positions, batch.labels, torch.ones(1, dtype=torch.int64))
    with Ledger() as ledger:
        for tensor in (*model.parameters(), *model.buffers(), *inputs):
            ledger.add(tensor)
        readings = [ledger.live_bytes]
        for layer in model.layers:
            inputs = layer(inputs)
            readings.append(_settled(ledger))
    return [after - before for before, after in pairwise(readings)]


def _settled(ledger: Ledger) -> int:
    """Live bytes once gloo's threads have released their buffers, a moment after the exchange."""
    seen, live_bytes = -1, ledger.live_bytes
    while seen != live_bytes:
        time.sleep(0.02)
        seen, live_bytes = live_bytes, ledger.live_bytes
    return live_bytes


def sent_bytes(config: Config, vocab_size: int, mesh: Mesh) -> dict[tuple[str, str], int]:
    """Bytes that this process passes to collectives in its second step, by group and operation.

    Groups are tp, cp, gradient, pp and model, others by their process group's name; groups of one rank are left out.
    """
    axes = [(name, getattr(mesh, name)) for name in ("model", "gradient", "pp", "cp", "tp")]
    axes.append(("cp", mesh.states))
    if (copies := mesh.copies(config.model.kv_heads)) is not None:
        axes.append(("tp", copies))
    names = {axis.group.group_name: name for name, axis in axes if axis.size > 1}
    single_rank_groups = {axis.group.group_name for _, axis in axes if axis.size == 1}
    engine = Engine(config, model_settings(config, mesh, vocab_size))
    batches = [random_batch(config, vocab_size, mesh)] * engine.micro_batches
    engine.train_step(batches, 1e-3)
    with Ledger() as ledger:
        engine.train_step(batches, 1e-3)
    counts: Counter[tuple[str, str]] = Counter()
    for message, count in ledger.sent.items():
        if message.group not in single_rank_groups and count:
            counts[names.get(message.group, message.group), message.operation] += count
    return dict(counts)


class Held(NamedTuple):
    """Bytes of tensors of one process."""

    between: int
    """Between two steps: weights, optimizer state and DeepSpeed's buffers."""

    peak: int
    """Peak during a step."""


def held_bytes(config: Config, vocab_size: int, mesh: Mesh) -> Held:
    """Bytes that this process holds in its second step; the first one allocates what stays."""
    with Ledger() as ledger:
        engine = Engine(config, model_settings(config, mesh, vocab_size))
        batches = [random_batch(config, vocab_size, mesh)] * engine.micro_batches
        engine.train_step(batches, 1e-3)
        gc.collect()
        between = ledger.live_bytes
        ledger.peak = ledger.live_bytes
        engine.train_step(batches, 1e-3)
    return Held(between, ledger.peak)
