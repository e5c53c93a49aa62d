"""The whole configuration, and what the number of processes has to fit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from .checks import agreement
from .data import Data, Masking
from .errors import ConfigError, Problem, nearest_multiples
from .init import Init
from .model import Model
from .objective import Objective
from .parallel import Parallel
from .section import Section
from .training import Checkpoint, Logging, Optimizer, Schedule, Training
from .uptrain import Uptrain


class Run(Section):
    """Name, place and seed of a run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Folder name under run.root."""

    root: Path = Path("runs")
    """Folder of all runs."""

    seed: int = Field(default=1234, ge=0)
    """Seed of weights, random features and data order."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.root / self.name


class Config(Section):
    """Everything that determines a training run."""

    run: Run
    model: Model
    data: Data
    init: Init = Init()
    objective: Objective = Objective()
    training: Training
    parallel: Parallel = Parallel()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    uptrain: Uptrain | None = None
    """Stages between the dense model of init.from and this model, for `megakernel uptrain`; null: one training run."""

    deepspeed: dict[str, Any] = Field(default={})
    """Passed to DeepSpeed as it is, merged last; keys that Megakernel itself decides are refused."""

    @property
    def predicted_share(self) -> float:
        """Share of the tokens that the head of a language model predicts."""
        return (self.data.masking or Masking()).rate if self.model.kind == "masked_lm" else 1.0

    def problems(self) -> Iterator[Problem]:
        """What sections ask of each other."""
        yield from agreement(dict(self))


def data_parallel_size(config: Config, world_size: int) -> int:
    """Replicas of the model in `world_size` processes, which are tensor x context x data x pipeline.

    ConfigError where the processes or a global batch do not divide, with the nearest numbers that do.
    """
    parallel = config.parallel
    if world_size % parallel.model_size:
        product = f"{parallel.tensor} x {parallel.context} x {parallel.pipeline}"
        reason = (
            f"is not a multiple of parallel.tensor x context x pipeline = {product} = {parallel.model_size}"
        )
        remedy = f"start {nearest_multiples(world_size, parallel.model_size)} or change parallel"
        raise ConfigError([Problem("processes", world_size, reason, remedy)])
    replicas = world_size // parallel.model_size
    problems = []
    for phase in config.training.phases:
        size, micro = phase.training.global_batch_size, phase.training.micro_batch_size
        if size % (unit := micro * replicas):
            reason = f"is not a multiple of micro_batch_size x data parallel = {micro} x {replicas} = {unit}"
            problems.append(
                Problem(
                    f"{phase.key}.global_batch_size", size, reason, f"set {nearest_multiples(size, unit)}"
                )
            )
    if problems:
        raise ConfigError(problems)
    return replicas
