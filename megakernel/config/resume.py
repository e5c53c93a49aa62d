"""Whether a run folder belongs to a configuration.

The rule: what determines which numbers a run produces is fixed with its first step; where, how fast, how long
and how closely watched it runs may change with every start. `_FREE` is the whole list of what may change.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError, Problem
from .load import from_yaml
from .tree import Config

_FREE = (
    "run.name",
    "run.root",
    "parallel",
    "checkpoint",
    "logging",
    "deepspeed",
    "data.validation",
    "data.index_cache",
    "data.num_workers",
    # A longer run is the same run. A schedule that decays over the rest of training moves with it.
    "training.steps",
    "training.micro_batch_size",
    "training.device",
    "training.log_every",
    "training.eval_every",
    "training.eval_samples",
    "training.activation_checkpointing",
    "training.checkpoint_offload",
    "training.mlp_chunk_size",
    "training.loss_chunk_size",
    # Passing over samples that made the loss diverge is done on resume; the order of the others stays.
    "training.skip_samples",
    "training.max_skipped_steps",
)


@dataclass(frozen=True)
class Difference:
    """One key on which two configurations differ."""

    key: str
    recorded: Any
    wanted: Any

    @property
    def may_change(self) -> bool:
        """Whether a run may be continued across this difference."""
        return any(self.key == free or self.key.startswith(f"{free}.") for free in _FREE)


def differences(recorded: Config, wanted: Config) -> list[Difference]:
    """Every key whose value differs, in the tree's order; a part that only one side has is one difference."""
    return list(_differences(recorded.model_dump(mode="json"), wanted.model_dump(mode="json"), ""))


def check_same_run(recorded_yaml: str, wanted: Config, folder: Path) -> list[Difference]:
    """The changes across which the run in `folder` goes on; ConfigError names those across which it must not.

    recorded_yaml is what `to_yaml` wrote when the run began.
    """
    found = differences(from_yaml(recorded_yaml, str(folder / "config.yaml")), wanted)
    refused = [item for item in found if not item.may_change]
    if refused:
        remedy = f"set it back, or choose another run.name to start a new run beside {folder}"
        raise ConfigError(
            [
                Problem(item.key, item.wanted, f"was {item.recorded!r} when the run began", remedy)
                for item in refused
            ]
        )
    return found


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str) -> Iterator[Difference]:
    for key in dict.fromkeys((*old, *new)):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{prefix}{key}.")
        elif before != after:
            yield Difference(prefix + key, before, after)
