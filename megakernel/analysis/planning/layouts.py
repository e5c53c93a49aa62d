"""All layouts of a run on so many devices, and why some are none: the configuration's own rules say it."""

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from megakernel.config import Config, ConfigError, Parallel, Problem, data_parallel_size
from megakernel.config.checks import agreement

from .layout import Layout

ZERO_STAGES = (0, 1, 2, 3)
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Refusal:
    """A way to cut the run that is none."""

    cut: str
    """tensor, context, pipeline and ZeRO stage."""

    problem: Problem


def cuts(devices: int, most_tensor: int, most_context: int) -> Iterator[Parallel | Refusal]:
    """Every tensor x context x pipeline of powers of two and every ZeRO stage; tensor ranks within a node."""
    for tensor in powers(min(devices, most_tensor)):
        for context in powers(min(devices // tensor, most_context)):
            for pipeline in powers(devices // (tensor * context)):
                for zero in ZERO_STAGES:
                    yield _parallel(tensor, context, pipeline, zero)


def _parallel(tensor: int, context: int, pipeline: int, zero: int) -> Parallel | Refusal:
    keys = {
        "tensor": tensor,
        "sequence_parallel": tensor > 1,
        "context": context,
        "pipeline": pipeline,
        "zero_stage": zero,
    }
    try:
        return Parallel.model_validate(keys)
    except ValidationError as error:
        cause: ConfigError = error.errors()[0]["ctx"]["error"]
        return Refusal(_named(keys), cause.problems[0].under("parallel"))


def _named(keys: dict) -> str:
    return f"tp {keys['tensor']}, cp {keys['context']}, pp {keys['pipeline']}, ZeRO {keys['zero_stage']}"


def candidates(
    config: Config, devices: int, most_tensor: int, most_context: int
) -> Iterator[Layout | Refusal]:
    """Every layout of a valid run, and what the rules of the configuration say about the others."""
    for cut in cuts(devices, most_tensor, most_context):
        if isinstance(cut, Refusal):
            yield cut
            continue
        changed = config.model_copy(update={"parallel": cut})
        named = _named(cut.model_dump())
        sections = {name: getattr(changed, name) for name in type(changed).model_fields}
        problem = next(iter(agreement(sections)), None)
        if problem is not None:
            yield Refusal(named, problem)
            continue
        yield from _micro_batches(changed, devices, named)


def _micro_batches(config: Config, devices: int, named: str) -> Iterator[Layout | Refusal]:
    batch = config.training.global_batch_size
    for rows in powers(batch):
        training = config.training.model_copy(update={"micro_batch_size": rows})
        try:
            data = data_parallel_size(config.model_copy(update={"training": training}), devices)
        except ConfigError as error:
            if rows == 1:  # larger micro-batches divide where this one does
                yield Refusal(named, error.problems[0])
            return
        for recompute in RECOMPUTE:
            yield layout_of(config.parallel, data, rows, recompute)


def layout_of(parallel: Parallel, data: int, rows: int, recompute) -> Layout:
    """The layout of these sections."""
    return Layout(
        parallel.tensor,
        parallel.sequence_parallel,
        parallel.context,
        data,
        parallel.pipeline,
        parallel.zero_stage,
        rows,
        recompute,
    )


def powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [2**exponent for exponent in range(most.bit_length())]
