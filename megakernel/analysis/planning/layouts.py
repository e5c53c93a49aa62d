"""All layouts of a run on so many devices, and why some are none: the configuration's own rules say it."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from pydantic import ValidationError

from megakernel.config import Config, ConfigError, Parallel, Problem, data_parallel_size
from megakernel.config.checks import agreement

from .layout import Layout, Recompute

ZERO_STAGES = (0, 1, 2, 3)
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
"""What repeats more is slower."""


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
    sections = {name: getattr(changed, name) for name in type(changed).model_fields}
    problem = next(iter(agreement(sections)), None)
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
