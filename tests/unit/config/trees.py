"""The smallest complete configuration, for tests to change single keys."""

from pathlib import Path
from typing import Any

from megakernel.config import Config, ConfigError, Problem
from megakernel.config.section import merged
from megakernel.config.validation import validate
from megakernel.config.yaml_text import write

SMALLEST: dict[str, Any] = {
    "run": {"name": "small"},
    "model": {"num_layers": 4, "hidden_size": 128, "num_heads": 4},
    "data": {"train": "data/x"},
    "training": {"steps": 100, "seq_len": 512, "global_batch_size": 8},
}


def config(**sections: Any) -> Config:
    """The smallest configuration with some keys changed."""
    return validate(merged(SMALLEST, sections))


def problems(**sections: Any) -> dict[str, Problem]:
    """Problems of the smallest configuration with some keys changed, by key."""
    try:
        config(**sections)
    except ConfigError as error:
        return {problem.key: problem for problem in error.problems}
    return {}


def file(folder: Path, name: str = "run.yaml", **sections: Any) -> Path:
    """The smallest configuration with some keys changed, as a file."""
    path = folder / name
    path.write_text(write(merged(SMALLEST, sections)))
    return path
