"""A finished checkpoint: a folder whose manifest, written last, says what must lie in it."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

MANIFEST = "complete.json"


@dataclass(frozen=True)
class Progress:
    """How far the run was, and what wrote the checkpoint."""

    step: int
    """Optimizer steps done."""

    consumed_samples: int
    """Training samples behind it: the position in the data."""

    consumed_tokens: int
    """Training tokens behind it."""

    layout: dict[str, int]
    """tensor, context, data, pipeline, zero_stage."""

    versions: dict[str, str]
    """Package -> version."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder `step_N` and what its manifest says."""

    folder: Path
    progress: Progress

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.progress.step

    @classmethod
    def read(cls, folder: Path) -> "Checkpoint":
        """Read the manifest and hold it against the files.

        Raises ValueError with the reason where the checkpoint is half-written or damaged.
        """
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
        except FileNotFoundError:
            raise ValueError(f"{MANIFEST} is missing, so it was not written to its end") from None
        except ValueError:
            raise ValueError(f"{MANIFEST} is damaged") from None
        for name, size in manifest["files"].items():
            file = folder / name
            if not file.is_file():
                raise ValueError(f"{name} is missing")
            if file.stat().st_size != size:
                raise ValueError(f"{name} has {file.stat().st_size} bytes instead of {size}")
        return cls(folder, Progress(**manifest["progress"]))


def write_manifest(folder: Path, progress: Progress, files: dict[str, int]) -> Path:
    """Write the manifest; `files` maps names relative to `folder` to sizes in bytes."""
    path = folder / MANIFEST
    path.write_text(json.dumps({"progress": asdict(progress), "files": files}, indent=1) + "\n")
    return path


def step_of(folder: Path) -> int | None:
    """N of a folder `step_N`, None for any other name."""
    match = re.fullmatch(r"step_(\d+)", folder.name)
    return int(match[1]) if match else None
