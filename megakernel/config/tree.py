"""The whole configuration."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from .checks import agreement
from .data import Data
from .errors import Problem
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

    def problems(self) -> Iterator[Problem]:
        """What sections ask of each other."""
        yield from agreement({name: getattr(self, name) for name in type(self).model_fields})
