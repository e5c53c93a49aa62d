"""Whether a configured run fits on a number of devices, and which layouts do, nearest and best first."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from pydantic import ValidationError

from megakernel.config import Config, ConfigError, Parallel, Problem, UserError, data_parallel_size
from megakernel.config.checks import section_conflicts
from megakernel.config.training import Recompute

from .gpus import Gpu
from .layout import EXCHANGE_KEYS, Layout, PlannedJob
from .memory import Memory, memory
from .traffic import sent_bytes

Way = Literal["strong", "weak", "longer"]
WAYS: dict[Way, str] = {
    "strong": "strong scaling: the same step on more devices",
    "weak": "weak scaling: a number of sequences that grows with the devices",
    "longer": "longer sequences: a context that grows with the devices",
}
"""Ways to scale a run with its devices."""

ZERO_KEY = "parallel.zero_stage"
"""Problems of this key do not explain why nothing fits: another ZeRO stage is valid for the same partition."""

ZERO_STAGES = (0, 1, 2, 3)
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
"""Kinds of recomputation, the one that repeats most last."""


@dataclass(frozen=True)
class Planned:
    """A layout, with the memory of its fullest device and what one device sends in a step."""

    layout: Layout
    memory: Memory

    sent: dict[str, float]
    """Bytes that leave one device in a step, by group."""

    idle: float
    """The share of a step in which a pipeline stage waits because the pipeline fills and drains."""

    overrides: dict[str, object]
    """Configuration key -> value, for the keys that the layout changes."""

    @property
    def words(self) -> str:
        """`overrides` as words of a command line."""
        values = {key: x if isinstance(x, str) else json.dumps(x) for key, x in self.overrides.items()}
        return " ".join(f"{key}={value}" for key, value in values.items())

    @property
    def rank(self) -> tuple[float, ...]:
        """Orders layouts: least recomputation, devices per copy of the model, idle time in tenths, traffic, memory."""
        layout = self.layout
        ranks = layout.tensor * layout.context * layout.pipeline
        sizes = (sum(self.sent.values()), self.memory.total)
        return RECOMPUTE.index(layout.recompute), ranks, round(self.idle, 1), *sizes


@dataclass(frozen=True)
class Plan:
    """The layouts of a run on a number of devices."""

    config: Config
    devices: int
    gpu: Gpu

    configured: Planned | str
    """The configured layout, or why it is none on this number of devices."""

    fitting: list[Planned]
    """One layout for each way to partition the run, by `Planned.rank`: that which recomputes least and, of those, has
    the largest micro-batch."""

    too_large: list[Planned]
    """Partitions that do not fit with any micro-batch and recomputation, smallest memory first."""

    refused: Counter[str]
    """Problem -> number of partitions that it excludes."""

    @property
    def best(self) -> Planned | None:
        """The first layout that fits."""
        return self.fitting[0] if self.fitting else None

    @property
    def nearest(self) -> Planned | None:
        """The configured layout if it fits; else the one that does and changes fewest keys, the best of several."""
        if not isinstance(self.configured, str) and self.configured.memory.beyond(self.gpu) <= 0:
            return self.configured
        return min(self.fitting, key=lambda one: (len(one.overrides), one.rank), default=None)

    @property
    def why_none(self) -> str:
        """Why no layout fits: the smallest memory needed, otherwise the problem that excludes most partitions."""
        if self.too_large:
            smallest = self.too_large[0]
            return f"needs {smallest.memory.total / 1e9:,.0f} GB at least ({smallest.layout})"
        reasons = [reason for reason, _ in self.refused.most_common() if not reason.startswith(ZERO_KEY)]
        return reasons[0] if reasons else "no layout"


def plan(config: Config, vocab_size: int, devices: int, gpu: Gpu) -> Plan:
    """Count the configured layout, and try the others.

    Raises UserError for an encoder-decoder, whose layers are not counted.
    """
    if config.model.encoder is not None:
        raise UserError(
            "model.kind=encoder_decoder is not planned: its layers read two sequences, and those of one are counted; "
            "train a few steps, which print memory and tokens per second"
        )
    refused: Counter[str] = Counter()
    fitting: list[Planned] = []
    too_large: list[Planned] = []
    for layouts in candidates(config, devices, gpu.per_node):
        if isinstance(layouts, Problem):
            refused[str(layouts)] += 1
            continue
        first, *others = layouts
        planned = _planned(config, vocab_size, first, gpu)
        if others and planned.memory.beyond(gpu) > 0:
            smallest = _planned(config, vocab_size, others[-1], gpu)
            tried = (_planned(config, vocab_size, layout, gpu) for layout in others[:-1])
            fits = smallest.memory.beyond(gpu) <= 0  # otherwise none does
            planned = next((one for one in tried if fits and one.memory.beyond(gpu) <= 0), smallest)
        (fitting if planned.memory.beyond(gpu) <= 0 else too_large).append(planned)
    fitting.sort(key=lambda planned: planned.rank)
    too_large.sort(key=lambda planned: planned.memory.total)
    try:
        configured: Planned | str = _planned(config, vocab_size, Layout.of(config, devices), gpu)
    except ConfigError as error:
        configured = str(error.problems[0])
    return Plan(config, devices, gpu, configured, fitting, too_large, refused)


def _planned(config: Config, vocab_size: int, layout: Layout, gpu: Gpu) -> Planned:
    job = PlannedJob(config, vocab_size, layout, per_machine=gpu.per_node)
    sections = config.model_dump(mode="json")
    changed = {
        key: value
        for key, value in layout.keys().items()
        if sections[key.split(".")[0]][key.split(".")[1]] != value
    }
    return Planned(layout, memory(job), sent_bytes(job), job.idle, changed)


def candidates(config: Config, devices: int, max_tensor: int) -> Iterator[list[Layout] | Problem]:
    """The layouts of each way to partition the run, those that recompute least first, or why it is invalid.

    Tensor, context and pipeline sizes are powers of two, micro-batches the configured one and smaller powers of two;
    every ZeRO stage is tried. max_tensor: most tensor ranks.
    """
    for tensor in powers(min(devices, max_tensor)):
        for context in powers(devices // tensor):
            for pipeline, zero in product(powers(devices // (tensor * context)), ZERO_STAGES):
                sizes = {"tensor": tensor, "sequence_parallel": tensor > 1, "context": context}
                yield _layouts_of(config, devices, sizes | {"pipeline": pipeline, "zero_stage": zero})


def _layouts_of(config: Config, devices: int, sizes: dict[str, Any]) -> list[Layout] | Problem:
    try:
        without_effect = EXCHANGE_KEYS if sizes["context"] == 1 else None
        keys = config.parallel.model_dump(exclude=without_effect) | sizes
        changed = config.model_copy(update={"parallel": Parallel.model_validate(keys)})
    except ValidationError as error:
        cause: ConfigError = error.errors()[0]["ctx"]["error"]
        return cause.problems[0].under("parallel")
    problem = next(iter(section_conflicts(dict(changed))), None)
    if problem is not None:
        return problem
    most = config.training.micro_batch_size
    data_sizes = {}
    for size in sorted({*powers(most), most}):
        training = config.training.model_copy(update={"micro_batch_size": size})
        try:
            data_sizes[size] = data_parallel_size(changed.model_copy(update={"training": training}), devices)
        except ConfigError as error:
            if size == 1:  # if a micro-batch of 1 does not divide, none does
                return error.problems[0]
    return [
        Layout(**sizes, data=data_sizes[size], micro_batch_size=size, recompute=recompute)
        for recompute, size in product(RECOMPUTE, sorted(data_sizes, reverse=True))
    ]


def powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [2**exponent for exponent in range(most.bit_length())]


def scaling(
    config: Config, vocab_size: int, counts: list[int], way: Way, gpu: Gpu, at: int | None = None
) -> Iterator[Plan]:
    """The plans for increasing numbers of devices.

    at: the number of devices for which the configuration is meant; None: the first of `counts`. Numbers that would need
    a fraction of a sequence or token are left out.
    """
    for count in counts:
        grown = scaled_config(config, way, count, at or counts[0])
        if grown is not None:
            yield plan(grown, vocab_size, count, gpu)


def scaled_config(config: Config, way: Way, count: int, at: int) -> Config | None:
    """The configuration for `count` devices; None if its size would not be an integer."""
    if way == "strong":
        return config
    key = "global_batch_size" if way == "weak" else "seq_len"
    size = getattr(config.training, key) * count
    if size % at:
        return None
    return config.model_copy(update={"training": config.training.model_copy(update={key: size // at})})
