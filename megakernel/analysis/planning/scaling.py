"""What more devices buy: the same step in less time, more rows in the same time, or longer rows in the same time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from megakernel.config import Config

from .gpus import Gpu
from .plan import Plan, plan
from .rates import ASSUMED, Rates

Way = Literal["strong", "weak", "longer"]
WAYS: dict[Way, str] = {
    "strong": "strong scaling: the same step on more devices",
    "weak": "weak scaling: as many rows more as devices",
    "longer": "longer rows: a context that grows with the devices",
}


@dataclass(frozen=True)
class Point:
    """The best layout of one number of devices."""

    config: Config
    plan: Plan

    @property
    def tokens_per_second(self) -> float | None:
        """Of all devices; None where no layout fits."""
        best = self.plan.best
        return None if best is None or best.step is None else best.step.tokens / best.step.seconds


def scaling(
    config: Config, vocab_size: int, counts: list[int], way: Way, gpu: Gpu, rates: Rates = ASSUMED
) -> Iterator[Point]:
    """The best layouts of ever more devices; the first of `counts` takes the configuration as it is."""
    for count in counts:
        grown = _GROWTH[way](config, count // counts[0])
        yield Point(grown, plan(grown, vocab_size, count, gpu, rates))


def efficiency(points: list[Point]) -> list[float | None]:
    """Tokens per second and device, over those of the first point that fits."""
    speeds = [
        None if point.tokens_per_second is None else point.tokens_per_second / point.plan.devices
        for point in points
    ]
    first = next((speed for speed in speeds if speed is not None), None)
    return [None if speed is None or first is None else speed / first for speed in speeds]


def _same(config: Config, factor: int) -> Config:
    return config


def _more_rows(config: Config, factor: int) -> Config:
    return changed(config, global_batch_size=config.training.global_batch_size * factor)


def _longer_rows(config: Config, factor: int) -> Config:
    return changed(config, seq_len=config.training.seq_len * factor)


_GROWTH: dict[Way, Callable[[Config, int], Config]] = {
    "strong": _same,
    "weak": _more_rows,
    "longer": _longer_rows,
}


def changed(config: Config, **training: int) -> Config:
    """The configuration with other keys of `training`."""
    return config.model_copy(update={"training": config.training.model_copy(update=training)})
