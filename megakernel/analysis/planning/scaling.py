"""What more devices buy: the same step in less time, more rows in the same time, or longer rows in the same time."""

from collections.abc import Iterator
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


def scaling(
    config: Config,
    vocab_size: int,
    counts: list[int],
    way: Way,
    gpu: Gpu,
    rates: Rates = ASSUMED,
    at: int | None = None,
) -> Iterator[Point]:
    """The best layouts of ever more devices.

    at: the number of devices for which the configuration is meant as it is; None: the first of `counts`. A number that
    would have part of a row is left out.
    """
    for count in counts:
        grown = grow(config, way, count, at or counts[0])
        if grown is not None:
            yield Point(grown, plan(grown, vocab_size, count, gpu, rates))


def grow(config: Config, way: Way, count: int, at: int) -> Config | None:
    """The configuration for `count` devices; None where its size is no whole number."""
    if way == "strong":
        return config
    key = "global_batch_size" if way == "weak" else "seq_len"
    size = getattr(config.training, key) * count
    if size % at:
        return None
    return config.model_copy(update={"training": config.training.model_copy(update={key: size // at})})


def efficiency(points: list[Point]) -> list[float]:
    """Tokens per second and device, over those of the first point that fits; 0 where none does."""
    speeds = []
    for point in points:
        best = point.plan.best
        speeds.append(best.step.tokens_per_second / point.plan.devices if best and best.step else 0.0)
    first = next(filter(None, speeds), 1.0)
    return [speed / first for speed in speeds]
