"""The layouts of a run on so many devices: the best first, why the others are out, and what more devices buy."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from pydantic import ValidationError

from megakernel.config import Config, ConfigError, Parallel, Problem, data_parallel_size
from megakernel.config.checks import agreement
from megakernel.config.training import Recompute

from .gpus import Gpu
from .layout import Job, KeyExchange, Layout
from .memory import Memory, memory
from .step import Step, necessary_flops, step

Way = Literal["strong", "weak", "longer"]
WAYS: dict[Way, str] = {
    "strong": "strong scaling: the same step on more devices",
    "weak": "weak scaling: as many sequences more as devices",
    "longer": "longer sequences: a context that grows with the devices",
}
"""How a run grows with its devices."""

ZERO_KEY = "parallel.zero_stage"
"""A stage that does not go with a cut is never what excludes it: another stage does."""


@dataclass(frozen=True)
class Sized:
    """One layout, and what its fullest device holds."""

    layout: Layout
    memory: Memory


@dataclass(frozen=True)
class Planned(Sized):
    """One layout that fits."""

    step: Step


@dataclass(frozen=True)
class Plan:
    """The layouts of a run on a number of devices."""

    config: Config
    devices: int

    fitting: list[Planned]
    """Fastest first; of layouts that differ in micro-batch and recomputation alone, the best one."""

    too_large: list[Sized]
    """Layouts that do not fit whatever their micro-batch and recomputation, nearest first."""

    refused: Counter[str]
    """Problem -> how many ways to cut the run it excludes."""

    @property
    def why_none(self) -> str:
        """Why no layout fits: the least memory that one needs, else what excludes most cuts."""
        if self.too_large:
            nearest = self.too_large[0]
            return f"needs {nearest.memory.total / 1e9:,.0f} GB at least ({nearest.layout})"
        reasons = [reason for reason, _ in self.refused.most_common() if not reason.startswith(ZERO_KEY)]
        return reasons[0] if reasons else "no layout"

    @property
    def best(self) -> Planned | None:
        """The fastest."""
        return self.fitting[0] if self.fitting else None


def plan(
    config: Config,
    vocab_size: int,
    devices: int,
    gpu: Gpu,
    exchange: KeyExchange = "own",
    rules: Config | None = None,
    most_tensor: int | None = None,
    most_context: int | None = None,
) -> Plan:
    """Try every layout.

    rules: the configuration whose rules decide what may be combined, where that is not `config`'s own.
    most_tensor: tensor ranks at most; None: those of a node.
    most_context: shards of a sequence at most; None: as many as there are devices.
    """
    refused: Counter[str] = Counter()
    fitting: dict[tuple, Planned] = {}
    too_large: dict[tuple, Sized] = {}
    full: set[tuple] = set()
    fits: set[tuple] = set()
    necessary: float | None = None
    most = (most_tensor or gpu.per_node, most_context or devices)
    for candidate in candidates(rules or config, devices, *most):
        if isinstance(candidate, Problem):
            refused[str(candidate)] += 1
            continue
        cut = (candidate.tensor, candidate.context, candidate.pipeline, candidate.zero_stage)
        way, sizes = (*cut, candidate.recompute), (*cut, candidate.micro_batch_size)
        if way in full or sizes in fits:
            continue  # nor do larger micro-batches fit; to recompute more is never faster
        job = Job(config, vocab_size, candidate, exchange=exchange)
        held = memory(job)
        if held.beyond(gpu) > 0:
            full.add(way)
            if cut not in too_large or held.total < too_large[cut].memory.total:
                too_large[cut] = Sized(candidate, held)
            continue
        fits.add(sizes)
        necessary = necessary or necessary_flops(job)
        one = Planned(candidate, held, step(job, gpu, necessary))
        if cut not in fitting or one.step.seconds < fitting[cut].step.seconds:
            fitting[cut] = one
    left = [one for cut, one in too_large.items() if cut not in fitting]
    left.sort(key=lambda one: one.memory.total)
    fastest_first = sorted(fitting.values(), key=lambda one: one.step.seconds)
    return Plan(config, devices, fastest_first, left, refused)


ZERO_STAGES = (0, 1, 2, 3)
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
"""Ways to recompute, the slowest last."""


def candidates(
    config: Config, devices: int, most_tensor: int, most_context: int
) -> Iterator[Layout | Problem]:
    """Every layout of a valid run, and what the rules of the configuration say about the others.

    They are tensor x context x pipeline of powers of two, every ZeRO stage, micro-batches of powers of two.
    """
    for tensor in powers(min(devices, most_tensor)):
        for context in powers(min(devices // tensor, most_context)):
            for pipeline, zero in product(powers(devices // (tensor * context)), ZERO_STAGES):
                cut = {"tensor": tensor, "sequence_parallel": tensor > 1, "context": context}
                yield from _of_cut(config, devices, cut | {"pipeline": pipeline, "zero_stage": zero})


def _of_cut(config: Config, devices: int, cut: dict[str, Any]) -> Iterator[Layout | Problem]:
    try:
        changed = config.model_copy(update={"parallel": Parallel.model_validate(cut)})
    except ValidationError as error:
        cause: ConfigError = error.errors()[0]["ctx"]["error"]
        yield cause.problems[0].under("parallel")
        return
    problem = next(iter(agreement(dict(changed))), None)
    if problem is not None:
        yield problem
        return
    for rows in powers(config.training.global_batch_size):
        training = config.training.model_copy(update={"micro_batch_size": rows})
        try:
            data = data_parallel_size(changed.model_copy(update={"training": training}), devices)
        except ConfigError as error:
            if rows == 1:  # larger micro-batches divide where this one does
                yield error.problems[0]
            return
        for recompute in RECOMPUTE:
            yield Layout(**cut, data=data, micro_batch_size=rows, recompute=recompute)


def powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [2**exponent for exponent in range(most.bit_length())]


def scaling(
    config: Config, vocab_size: int, counts: list[int], way: Way, gpu: Gpu, at: int | None = None
) -> Iterator[Plan]:
    """The plans of ever more devices.

    at: the number of devices for which the configuration is meant as it is; None: the first of `counts`. A number that
    would have part of a sequence is left out.
    """
    for count in counts:
        grown = grow(config, way, count, at or counts[0])
        if grown is not None:
            yield plan(grown, vocab_size, count, gpu)


def grow(config: Config, way: Way, count: int, at: int) -> Config | None:
    """The configuration for `count` devices; None where its size is no whole number."""
    if way == "strong":
        return config
    key = "global_batch_size" if way == "weak" else "seq_len"
    size = getattr(config.training, key) * count
    if size % at:
        return None
    return config.model_copy(update={"training": config.training.model_copy(update={key: size // at})})


def efficiency(plans: list[Plan]) -> list[float]:
    """Tokens per second and device, over those of the first plan that fits; 0 where none does."""
    speeds = [one.best.step.tokens_per_second / one.devices if one.best else 0.0 for one in plans]
    first = next(filter(None, speeds), 1.0)
    return [speed / first for speed in speeds]
