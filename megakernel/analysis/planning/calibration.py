"""What a real run keeps, holds and takes on this machine: what predictions are measured against."""

import gc
import time
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from data_pipeline.batch import Batch
from megakernel.config import Config
from megakernel.model import LanguageModel
from megakernel.model.settings import model_settings
from megakernel.parallel import Mesh
from megakernel.training.engine import Engine

from .counters import LiveBytes, WireCounter


def random_batch(config: Config, vocab_size: int, mesh: Mesh) -> Batch:
    """One micro-batch of this process: tokens at random, every row one document."""
    rows, length = config.training.micro_batch_size, config.training.seq_len
    generator = torch.Generator().manual_seed(mesh.dp.rank)
    tokens = torch.randint(0, vocab_size, (rows, length), generator=generator)
    counts = torch.ones(rows, length, dtype=torch.bool)
    positions = torch.arange(length).expand(rows, length).contiguous()
    whole = (tokens, tokens.roll(-1, 1), counts, positions)
    return Batch(*(x.chunk(mesh.cp.size, 1)[mesh.cp.rank] for x in whole))


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
            at.append(_settled(live))
    return [after - before for before, after in pairwise(at)]


def _settled(live: LiveBytes) -> int:
    """What lives once gloo's threads have let go of what they exchanged, a moment after the process has got it."""
    seen, now = -1, live.now
    while seen != now:
        time.sleep(0.02)
        seen, now = now, live.now
    return now


def sent_bytes(config: Config, vocab_size: int, mesh: Mesh) -> dict[tuple[str, str], int]:
    """What this process hands to collectives in its second step, by group and operation.

    Groups are tp, cp, gradient, pp and model, others by their process group's name; those of one process are left out.
    """
    axes = {name: getattr(mesh, name) for name in ("model", "gradient", "pp", "cp", "tp")}
    names = {axis.group.group_name: name for name, axis in axes.items() if axis.size > 1}
    alone = {axis.group.group_name for axis in axes.values() if axis.size == 1}
    engine = Engine(config, model_settings(config, mesh, vocab_size))
    batches = [random_batch(config, vocab_size, mesh)] * engine.micro_batches
    engine.train_step(batches, 1e-3)
    with WireCounter() as wire:
        engine.train_step(batches, 1e-3)
    return {
        (names.get(group, group), operation): count
        for (group, operation), count in wire.bytes.items()
        if group not in alone and count
    }


class Held(NamedTuple):
    """Bytes of tensors of one process."""

    between: int
    """Between two steps: weights, optimizer state and what DeepSpeed keeps."""

    peak: int
    """At most during a step."""


def held_bytes(config: Config, vocab_size: int, mesh: Mesh) -> Held:
    """What this process holds, from the second step on."""
    with LiveBytes() as live:
        engine = Engine(config, model_settings(config, mesh, vocab_size))
        batches = [random_batch(config, vocab_size, mesh)] * engine.micro_batches
        engine.train_step(batches, 1e-3)
        gc.collect()
        between = live.now
        live.peak = live.now
        engine.train_step(batches, 1e-3)
    return Held(between, live.peak)


def step_seconds(config: Config, vocab_size: int, mesh: Mesh, steps: int = 3) -> float:
    """Processor time of a step on a CPU, the least of several after a first one."""
    engine = Engine(config, model_settings(config, mesh, vocab_size))
    batches = [random_batch(config, vocab_size, mesh)] * engine.micro_batches
    engine.train_step(batches, 1e-3)
    times = []
    for _ in range(steps):
        start = time.process_time()
        engine.train_step(batches, 1e-3)
        times.append(time.process_time() - start)
    return min(times)
