"""Whether a run folder belongs to a configuration.

The rule: what determines which numbers a run produces is fixed once its first step has succeeded; where, how fast, how
long and how closely watched it runs may change with every start, and learning rates behind steps that were not finite.
`_FREE` is the whole list of what may change, and `_OF_LENGTH` of what may change behind the steps that the run was to
have: phases of longer sequences may follow. `_OF_STAGES` is what may not change either where the run is an up-training.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError, Problem
from .load import from_yaml
from .tree import Config
from .yaml_text import text_of

UNPROVEN = "# No step has succeeded with this yet: every key may change.\n"
NOT_FINITE = "# The last steps were not finite: learning rates may change.\n"
"""First lines of a recorded configuration that is not fixed, or not all of it."""

_FREE = (
    "run.name",
    "run.root",
    "parallel",
    "checkpoint",
    "init",
    "logging",
    "deepspeed",
    "data.validation",
    "data.add_bos",
    "data.index_cache",
    "data.num_workers",
    # A longer run is the same run. A schedule that decays over the rest of training moves with it.
    "training.steps",
    "training.micro_batch_size",
    "training.device",
    "training.log_every",
    "training.eval_every",
    "training.eval_samples",
    "training.eval_seq_len",
    "training.activation_checkpointing",
    "training.checkpoint_offload",
    "training.mlp_chunk_size",
    "training.loss_chunk_size",
    # Passing over samples that made the loss diverge is done on resume; the order of the others stays.
    "training.skip_samples",
    "training.max_skipped_steps",
    "training.profile",
)

_OF_LENGTH = (
    "training.seq_len",
    "training.seq_len_schedule",
    "training.global_batch_size",
    "model.rope_base",
    "model.rope_scaling",
)

_OF_STAGES = ("training.steps", "init.from", "init.moments")
"""What any other run may change as it goes on; stages of an up-training have begun with it, and more are to."""


@dataclass(frozen=True)
class Difference:
    """One key on which two configurations differ."""

    key: str
    recorded: Any
    wanted: Any

    may_change: bool
    """Whether a run may be continued across this difference."""

    @property
    def is_rate(self) -> bool:
        """Whether it is a learning rate."""
        return self.key.endswith((".lr", "_lr"))


def differences(recorded: Config, wanted: Config) -> list[Difference]:
    """Every key whose value differs, in the tree's order; a part that only one side has is one difference."""
    steps = recorded.training.steps
    free = (*_FREE, *_OF_LENGTH) if _steps(recorded, steps) == _steps(wanted, steps) else _FREE
    fixed = () if wanted.uptrain is None else _OF_STAGES
    below = tuple(f"{key}." for key in free)
    found = _changed(recorded.model_dump(mode="json"), wanted.model_dump(mode="json"), "")
    return [
        Difference(key, before, after, key not in fixed and f"{key}.".startswith(below))
        for key, before, after in found
    ]


def _steps(config: Config, steps: int) -> list[tuple[Any, ...]]:
    """What the first `steps` steps read and rotate by, a tuple for each stretch of steps that are alike."""
    model = config.model
    # Without a number of their own, learned positions and linformer's columns are as many as the longest sequence's
    # tokens.
    rows = (model.max_positions or config.training.seq_len) if model.counts_positions else None
    stretches: list[tuple[Any, ...]] = []
    # A run that ends within a phase may be given more of it.
    phases = [phase for phase in config.training.phases if phase.first_step < steps]
    for phase in phases:
        rotary = phase.model(model)
        batch = (phase.training.seq_len, phase.training.global_batch_size)
        alike = (rows, *batch, rotary.rope_base, rotary.rope_scaling)
        end = steps if phase is phases[-1] else phase.end_step
        if stretches and stretches[-1][1:] == alike:
            stretches.pop()
        stretches.append((end, *alike))
    return stretches


def check_same_run(recorded_yaml: str, wanted: Config, folder: Path) -> list[Difference]:
    """The changes across which the run in `folder` goes on; ConfigError names those across which it must not.

    recorded_yaml is what `to_yaml` wrote when the run began, with UNPROVEN or NOT_FINITE before it or nothing.
    """
    found = differences(from_yaml(recorded_yaml, str(folder / "config.yaml")), wanted)
    if recorded_yaml.startswith(UNPROVEN):
        return found
    rates_too = recorded_yaml.startswith(NOT_FINITE)
    refused = [item for item in found if not (item.may_change or (rates_too and item.is_rate))]
    if refused:
        remedy = f"set it back, or choose another run.name to start a new run beside {folder}"
        raise ConfigError(
            [
                Problem(item.key, item.wanted, f"was {item.recorded!r} when the run began", remedy)
                for item in refused
            ]
        )
    return found


def _changed(old: dict[str, Any], new: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any, Any]]:
    for key in dict.fromkeys((*old, *new)):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _changed(before, after, f"{prefix}{key}.")
        elif before != after:
            yield prefix + key, before, after


def check_recorded_run(wanted: Config) -> bool:
    """`check_same_run` on the run that is in the folder of `wanted`; whether there is one."""
    file = wanted.run.folder / "config.yaml"
    if not file.exists():
        return False
    check_same_run(text_of(file), wanted, wanted.run.folder)
    return True
