"""The layouts of a run on a number of devices, fastest first, why others are excluded, and scaling."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from pydantic import ValidationError

from megakernel.config import Config, ConfigError, Parallel, Problem, data_parallel_size
from megakernel.config.checks import section_conflicts
from megakernel.config.training import Recompute

from .gpus import Gpu
from .layout import EXCHANGE_KEYS, Job, KeyExchange, Layout
from .memory import Memory, memory
from .step import Step, necessary_flops, step

Way = Literal["strong", "weak", "longer"]
WAYS: dict[Way, str] = {
    "strong": "strong scaling: the same step on more devices",
    "weak": "weak scaling: a number of sequences that grows with the devices",
    "longer": "longer sequences: a context that grows with the devices",
}
"""Ways to scale a run with its devices."""

ZERO_KEY = "parallel.zero_stage"
"""Problems of this key do not explain why nothing fits: another ZeRO stage is valid for the same partition."""


@dataclass(frozen=True)
class Sized:
    """A layout and the memory of its fullest device."""

    layout: Layout
    memory: Memory


@dataclass(frozen=True)
class Planned(Sized):
    """A layout that fits, with its predicted step."""

    step: Step


@dataclass(frozen=True)
class Plan:
    """The layouts of a run on a number of devices."""

    config: Config
    devices: int

    fitting: list[Planned]
    """Fastest first; only the best of layouts that differ in micro-batch and recomputation alone."""

    too_large: list[Sized]
    """Layouts that do not fit with any micro-batch and recomputation, smallest memory first."""

    refused: Counter[str]
    """Problem -> number of partitions that it excludes."""

    @property
    def why_none(self) -> str:
        """Why no layout fits: the smallest memory needed, otherwise the problem that excludes most partitions."""
        if self.too_large:
            nearest = self.too_large[0]
            return f"needs {nearest.memory.total / 1e9:,.0f} GB at least ({nearest.layout})"
        reasons = [reason for reason, _ in self.refused.most_common() if not reason.startswith(ZERO_KEY)]
        return reasons[0] if reasons else "no layout"

    @property
    def best(self) -> Planned | None:
        """The fastest layout that fits."""
        return self.fitting[0] if self.fitting else None


def plan(
    config: Config,
    vocab_size: int,
    devices: int,
    gpu: Gpu,
    exchange: KeyExchange = "configured",
    rules: Config | None = None,
    max_tensor: int | None = None,
    max_context: int | None = None,
) -> Plan:
    """Try every layout.

    rules: a configuration whose validity rules apply instead of those of `config`.
    max_tensor: maximum tensor ranks; None: those of a node.
    max_context: maximum context ranks; None: the number of devices.
    """
    refused: Counter[str] = Counter()
    fitting: dict[tuple, Planned] = {}
    too_large: dict[tuple, Sized] = {}
    full: set[tuple] = set()
    fits: set[tuple] = set()
    necessary: float | None = None
    most = (max_tensor or gpu.per_node, max_context or devices)
    for candidate in candidates(rules or config, devices, *most):
        if isinstance(candidate, Problem):
            refused[str(candidate)] += 1
            continue
        sizes = (candidate.tensor, candidate.context, candidate.pipeline, candidate.zero_stage)
        recompute_key, batch_key = (*sizes, candidate.recompute), (*sizes, candidate.micro_batch_size)
        if recompute_key in full or batch_key in fits:
            continue  # larger micro-batches do not fit either; more recomputation is never faster
        job = Job(config, vocab_size, candidate, exchange=exchange)
        held = memory(job)
        if held.beyond(gpu) > 0:
            full.add(recompute_key)
            if sizes not in too_large or held.total < too_large[sizes].memory.total:
                too_large[sizes] = Sized(candidate, held)
            continue
        fits.add(batch_key)
        necessary = necessary or necessary_flops(job)
        planned = Planned(candidate, held, step(job, gpu, necessary))
        if sizes not in fitting or planned.step.seconds < fitting[sizes].step.seconds:
            fitting[sizes] = planned
    left = [sized for sizes, sized in too_large.items() if sizes not in fitting]
    left.sort(key=lambda sized: sized.memory.total)
    fastest_first = sorted(fitting.values(), key=lambda planned: planned.step.seconds)
    return Plan(config, devices, fastest_first, left, refused)


ZERO_STAGES = (0, 1, 2, 3)
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
"""Kinds of recomputation, the slowest last."""


def candidates(config: Config, devices: int, max_tensor: int, max_context: int) -> Iterator[Layout | Problem]:
    """Every valid layout, and a problem for each invalid one.

    Tensor, context and pipeline sizes and micro-batches are powers of two; every ZeRO stage is tried.
    """
    for tensor in powers(min(devices, max_tensor)):
        for context in powers(min(devices // tensor, max_context)):
            for pipeline, zero in product(powers(devices // (tensor * context)), ZERO_STAGES):
                sizes = {"tensor": tensor, "sequence_parallel": tensor > 1, "context": context}
                yield from _layouts_of(config, devices, sizes | {"pipeline": pipeline, "zero_stage": zero})


def _layouts_of(config: Config, devices: int, sizes: dict[str, Any]) -> Iterator[Layout | Problem]:
    try:
        without_effect = EXCHANGE_KEYS if sizes["context"] == 1 else None
        keys = config.parallel.model_dump(exclude=without_effect) | sizes
        changed = config.model_copy(update={"parallel": Parallel.model_validate(keys)})
    except ValidationError as error:
        cause: ConfigError = error.errors()[0]["ctx"]["error"]
        yield cause.problems[0].under("parallel")
        return
    problem = next(iter(section_conflicts(dict(changed))), None)
    if problem is not None:
        yield problem
        return
    for size in powers(config.training.global_batch_size):
        training = config.training.model_copy(update={"micro_batch_size": size})
        try:
            data = data_parallel_size(changed.model_copy(update={"training": training}), devices)
        except ConfigError as error:
            if size == 1:  # if a micro-batch of 1 does not divide, none does
                yield error.problems[0]
            return
        for recompute in RECOMPUTE:
            yield Layout(**sizes, data=data, micro_batch_size=size, recompute=recompute)


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


def efficiency(plans: list[Plan]) -> list[float]:
    """Tokens per second per device, relative to the first plan that fits; 0 if a plan has no layout."""
    speeds = [x.best.step.tokens_per_second / x.devices if x.best else 0.0 for x in plans]
    first = next(filter(None, speeds), 1.0)
    return [speed / first for speed in speeds]
