"""Which keys may change when a run resumes.

Keys that determine a run's numbers are fixed once its first step has succeeded. Where, how fast, how long and how
closely monitored it runs may change at every start, and learning rates after steps that were not finite.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError, Problem
from .load import from_yaml
from .tree import Config
from .yaml_text import read_text

UNPROVEN = "# No step has succeeded with this yet: every key may change.\n"
NOT_FINITE = "# The last steps were not finite: learning rates may change.\n"
"""First line of a recorded config.yaml of which all keys, or only learning rates, may change."""

_CHANGEABLE = (
    "run.name",
    "run.root",
    "parallel",
    "checkpoint",
    "init",
    "logging",
    "deepspeed",
    "data.validation",
    "data.tokenizer",
    "data.verify",
    "data.add_bos",
    "data.index_cache",
    "data.num_workers",
    # A longer run is the same run; a schedule that decays until the end of training stretches with it.
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
    # Samples that made the loss diverge are skipped on resume; the order of the others does not change.
    "training.skip_samples",
    "training.max_skipped_steps",
    "training.profile",
)
"""Keys that may always change."""

_CHANGEABLE_AFTER_PLANNED_STEPS = (
    "training.seq_len",
    "training.seq_len_schedule",
    "training.global_batch_size",
    "model.rope_base",
    "model.rope_scaling",
)
"""Keys that may change if the steps planned so far do not: phases of longer sequences may follow them."""

_FIXED_IN_UPTRAINING = ("training.steps", "init.from", "init.moments")
"""Keys that an up-training may not change, unlike other runs: its stages are derived from them."""


@dataclass(frozen=True)
class Difference:
    """One key on which two configurations differ."""

    key: str
    recorded: Any
    wanted: Any

    may_change: bool
    """Whether the run may resume in spite of it."""

    @property
    def is_learning_rate(self) -> bool:
        """Whether another learning rate is wanted for the same weights."""
        # With optimizer.mechanism_lr the mechanisms' weights are a parameter group of their own, without it not.
        regroups = self.key == "optimizer.mechanism_lr" and None in (self.recorded, self.wanted)
        return self.key.endswith((".lr", "_lr")) and not regroups


def differences(recorded: Config, wanted: Config) -> list[Difference]:
    """Every key whose value differs, in the tree's order; a section that only one side has is one difference."""
    steps = recorded.training.steps
    same_steps = _step_settings(recorded, steps) == _step_settings(wanted, steps)
    changeable = (*_CHANGEABLE, *_CHANGEABLE_AFTER_PLANNED_STEPS) if same_steps else _CHANGEABLE
    fixed = () if wanted.uptrain is None else _FIXED_IN_UPTRAINING
    prefixes = tuple(f"{key}." for key in changeable)
    return [
        Difference(key, before, after, key not in fixed and f"{key}.".startswith(prefixes))
        for key, before, after in _changed(
            recorded.model_dump(mode="json"), wanted.model_dump(mode="json"), ""
        )
    ]


def _step_settings(config: Config, steps: int) -> list[tuple[Any, ...]]:
    """Sequence shapes and rotary settings of the first `steps` steps, a tuple per range of equal ones."""
    model = config.model
    # Without max_positions, position tables and linformer's matrices have a column per token of the longest sequence.
    columns = (model.max_positions or config.training.seq_len) if model.has_position_parameters else None
    ranges: list[tuple[Any, ...]] = []
    # The phase in which the run ended may become longer.
    phases = [phase for phase in config.training.phases if phase.first_step < steps]
    for phase in phases:
        rotary = phase.model(model)
        batch = (phase.training.seq_len, phase.training.global_batch_size)
        settings = (columns, *batch, rotary.rope_base, rotary.rope_scaling)
        end = steps if phase is phases[-1] else phase.end_step
        if ranges and ranges[-1][1:] == settings:
            ranges.pop()
        ranges.append((end, *settings))
    return ranges


def check_same_run(recorded_yaml: str, wanted: Config, folder: Path) -> list[Difference]:
    """The permitted changes with which the run in `folder` resumes; ConfigError lists those that are not permitted.

    recorded_yaml: text of its config.yaml: UNPROVEN, NOT_FINITE or nothing, then the output of `to_yaml`.
    """
    recorded = from_yaml(recorded_yaml, str(folder / "config.yaml"))
    changes = differences(recorded, in_order_of(recorded_yaml, wanted, folder))
    if recorded_yaml.startswith(UNPROVEN):
        return changes
    rates_too = recorded_yaml.startswith(NOT_FINITE)
    refused = [item for item in changes if not (item.may_change or (rates_too and item.is_learning_rate))]
    if refused:
        remedy = f"set it back, or choose another run.name to start a new run beside {folder}"
        raise ConfigError(
            [
                Problem(item.key, item.wanted, f"was {item.recorded!r} when the run began", remedy)
                for item in refused
            ]
        )
    return changes


def in_order_of(recorded_yaml: str, wanted: Config, folder: Path) -> Config:
    """`wanted` with the order of corpora with which the run in `folder` began, unless no step has succeeded yet.

    That is data.blend, and for a run of an earlier version, whose corpora without weights had equal ones, these.
    """
    if recorded_yaml.startswith(UNPROVEN):
        return wanted
    recorded = from_yaml(recorded_yaml, str(folder / "config.yaml")).data
    changes: dict[str, Any] = {"blend": recorded.blend}
    for key in ("train", "validation"):
        before, now = getattr(recorded, key) or [], getattr(wanted.data, key) or []
        have_equal_weights = all(corpus.weight == 1 for corpus in before)
        same_paths = [corpus.path for corpus in before] == [corpus.path for corpus in now]
        without_weights = all(corpus.weight is None for corpus in now)
        if recorded.blend == "periodic" and have_equal_weights and same_paths and without_weights:
            changes[key] = getattr(recorded, key)
    return wanted.model_copy(update={"data": wanted.data.model_copy(update=changes)})


def in_recorded_order(wanted: Config) -> Config:
    """`in_order_of` the run in the folder of `wanted`, if there is one."""
    file = wanted.run.folder / "config.yaml"
    return in_order_of(read_text(file), wanted, wanted.run.folder) if file.exists() else wanted


def _changed(old: dict[str, Any], new: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any, Any]]:
    for key in dict.fromkeys((*old, *new)):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _changed(before, after, f"{prefix}{key}.")
        elif before != after:
            yield prefix + key, before, after


def check_recorded_run(wanted: Config) -> bool:
    """Apply `check_same_run` to the run in the folder of `wanted`; whether there is one."""
    file = wanted.run.folder / "config.yaml"
    if not file.exists():
        return False
    check_same_run(read_text(file), wanted, wanted.run.folder)
    return True
