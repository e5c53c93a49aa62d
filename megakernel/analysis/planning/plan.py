"""The layouts of a run on so many devices: the best first, and why the others are out."""

from collections import Counter
from dataclasses import dataclass

from megakernel.config import Config, Problem

from .gpus import Gpu
from .layout import Exchange, Job, Layout
from .layouts import candidates
from .memory import Memory, memory
from .rates import ASSUMED, Rates
from .step import Step, necessary_flops, step

ZERO_KEY = "parallel.zero_stage"
"""A stage that does not go with a cut is never what excludes it: another stage does."""


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
    rates: Rates = ASSUMED,
    exchange: Exchange = "own",
    rules: Config | None = None,
    most_tensor: int | None = None,
    most_context: int | None = None,
) -> Plan:
    """Try every layout.

    rules: the configuration whose rules decide what may be combined, where that is not `config`'s own.
    most_tensor: tensor ranks at most; None: those of a node.
    most_context: shards of a row at most; None: as many as there are devices.
    """
    refused: Counter[str] = Counter()
    fitting: dict[tuple, Planned] = {}
    too_large: dict[tuple, Planned] = {}
    full: set[tuple] = set()
    fits: set[tuple] = set()
    necessary: float | None = None
    for candidate in candidates(
        rules or config, devices, most_tensor or gpu.per_node, most_context or devices
    ):
        if isinstance(candidate, Problem):
            refused[str(candidate)] += 1
            continue
        cut = (candidate.tensor, candidate.context, candidate.pipeline, candidate.zero_stage)
        way = (*cut, candidate.recompute)
        sizes = (*cut, candidate.micro_batch_size)
        if way in full or sizes in fits:
            continue  # nor do larger micro-batches fit; to recompute more is never faster
        job = Job(config, vocab_size, candidate, exchange=exchange)
        held = memory(job)
        if held.beyond(gpu) > 0:
            full.add(way)
            nearest = too_large.get(cut)
            if nearest is None or held.total < nearest.memory.total:
                too_large[cut] = Planned(candidate, held, None)
            continue
        fits.add(sizes)
        necessary = necessary or necessary_flops(job)
        one = Planned(candidate, held, step(job, gpu, rates, necessary))
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
