"""The whole configuration, and the data-parallel size of a world."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from .checks import section_conflicts
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
    """Name, folder and seed of a run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=255)
    """Name of the run and of its folder under run.root. Starting the same name again resumes the run."""

    root: Path = Path("runs")
    """Folder that contains the run folders."""

    seed: int = Field(default=1234, ge=0)
    """Seed of initial weights, random features and data order."""

    @property
    def folder(self) -> Path:
        """The run folder, root/name."""
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
    """Stages of `megakernel uptrain` from the dense model of init.from to this model; None: one training run."""

    deepspeed: dict[str, Any] = Field(default={})
    """Further DeepSpeed configuration, merged over Megakernel's; keys that other sections determine are refused."""

    @property
    def most_positions(self) -> int | None:
        """Positions that the model has parameters for; None: sequences may have any length."""
        return (
            self.model.max_positions or self.training.seq_len if self.model.has_position_parameters else None
        )

    @property
    def predicted_share(self) -> float:
        """Share of the tokens that a language model's head predicts."""
        return (self.data.masking or Masking()).rate if self.model.kind == "masked_lm" else 1.0

    def problems(self) -> Iterator[Problem]:
        """Conflicts between sections."""
        yield from section_conflicts(dict(self))


def data_parallel_size(config: Config, world_size: int) -> int:
    """Data-parallel replicas in `world_size` = tensor x context x data x pipeline processes.

    ConfigError if the processes or a global batch do not divide evenly; it names the nearest numbers that do.
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
