"""The layouts of a run on so many devices: the best first, and why the others are out."""

from collections import Counter
from dataclasses import dataclass

from megakernel.config import Config

from .gpus import Gpu
from .layout import Exchange, Job, Layout
from .layouts import Refusal, candidates
from .memory import Memory, memory
from .rates import ASSUMED, Rates
from .step import Step, step


@dataclass(frozen=True)
class Planned:
    """One layout that fits, or by how much it does not."""

    layout: Layout
    memory: Memory
    step: Step | None
    """None where it does not fit."""


@dataclass(frozen=True)
class Plan:
    """What a number of devices can do with a run."""

    devices: int

    fitting: list[Planned]
    """Fastest first; of layouts that differ in micro-batch and recomputation alone, the best one."""

    too_large: list[Planned]
    """Those that do not fit whatever their micro-batch and recomputation, nearest first."""

    refused: Counter[str]
    """Problem -> how many ways to cut the run it excludes."""

    @property
    def best(self) -> Planned | None:
        """The fastest."""
        return self.fitting[0] if self.fitting else None


def plan(
    config: Config,
    vocab_size: int,
    devices: int,
    gpu: Gpu,
    rates: Rates = ASSUMED,
    exchange: Exchange = "own",
    rules: Config | None = None,
) -> Plan:
    """Try every layout.

    rules: the configuration whose rules decide what may be combined, where that is not `config`'s own.
    """
    refused: Counter[str] = Counter()
    fitting: dict[tuple, Planned] = {}
    too_large: dict[tuple, Planned] = {}
    full: set[tuple] = set()
    for candidate in candidates(rules or config, devices, gpu.per_node):
        if isinstance(candidate, Refusal):
            refused[str(candidate.problem)] += 1
            continue
        cut = (candidate.tensor, candidate.context, candidate.pipeline, candidate.zero_stage)
        way = (*cut, candidate.recompute)
        if way in full:
            continue  # nor do larger micro-batches fit
        job = Job(config, vocab_size, candidate, exchange=exchange)
        held = memory(job)
        if held.beyond(gpu) > 0:
            full.add(way)
            nearest = too_large.get(cut)
            if nearest is None or held.total < nearest.memory.total:
                too_large[cut] = Planned(candidate, held, None)
            continue
        one = Planned(candidate, held, step(job, gpu, rates))
        best = fitting.get(cut)
        if best is None or _seconds(one) < _seconds(best):
            fitting[cut] = one
    return Plan(
        devices,
        sorted(fitting.values(), key=_seconds),
        sorted(
            (one for cut, one in too_large.items() if cut not in fitting), key=lambda one: one.memory.total
        ),
        refused,
    )


def _seconds(one: Planned) -> float:
    assert one.step is not None
    return one.step.seconds
