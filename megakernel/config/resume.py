"""Which keys may change when a run resumes.

Keys that determine a run's numbers are fixed once its first step has succeeded. Where, how fast, how long and how
closely monitored it runs may change at every start, and learning rates after steps that were not finite. Some more may
change on purpose (`--allow-change`).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .data import TextOrder
from .data_phases import data_phases, length_ends, mixture_at, mixtures
from .errors import ConfigError, Problem, nearest_first
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
    "training.eval_sources",
    "training.eval_seq_len",
    "training.activation_checkpointing",
    # Sums in another order, as another layout has them: losses agree to 1e-5 in float32.
    "training.compile",
    "training.fp8",
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
    "data.stages",
    "training.seq_len",
    "training.seq_len_schedule",
    "training.global_batch_size",
    "model.rope_base",
    "model.rope_scaling",
)
"""Keys that may change if the steps planned so far do not: longer sequences or other text may follow them."""

CHANGEABLE_ON_PURPOSE = (
    "optimizer.lr",
    "optimizer.mechanism_lr",
    "optimizer.muon_lr",
    "optimizer.muon_momentum",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.clip_grad_norm",
    "schedule",
    "training.z_loss",
    "model.dropout",
    *_CHANGEABLE_AFTER_PLANNED_STEPS,
)
"""Keys that may change if `--allow-change` names them; the last ones if the steps of the newest checkpoint do not."""

_WHY_FIXED = {
    "run": "decides the order of the samples and every random number",
    "model": "decides which weights the model has, or what it computes with them",
    "data": "decides which samples the run reads, in which order",
    "training": "decides what the run reads or computes",
    "optimizer": "decides which weights are trained, and how the optimizer groups them",
    "objective": "decides what the run learns from",
    "uptrain": "decides the stages",
}
"""Section -> why its remaining keys cannot change within a run."""

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
        return self.key.endswith((".lr", "_lr")) and not self.regroups

    @property
    def is_of_training(self) -> bool:
        """Whether the run learns differently from here on, rather than elsewhere, faster or more closely watched."""
        return not self.may_change or f"{self.key}.".startswith(
            tuple(f"{key}." for key in (*CHANGEABLE_ON_PURPOSE, "training.steps"))
        )

    @property
    def regroups(self) -> bool:
        """Whether weights would change their group: with optimizer.mechanism_lr, mechanisms have one of their own."""
        return self.key == "optimizer.mechanism_lr" and None in (self.recorded, self.wanted)


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
        if not f"{key}.".startswith("data.order.")  # it follows from other keys
    ]


def _step_settings(config: Config, steps: int) -> list[tuple[Any, ...]]:
    """Corpora, sequence shapes and rotary settings of the first `steps` steps, a tuple per range of equal ones."""
    model = config.model
    # Without max_positions, position tables and linformer's matrices have a column per token of the longest sequence.
    columns = (model.max_positions or config.training.seq_len) if model.has_position_parameters else None
    ranges: list[tuple[Any, ...]] = []
    # The phase in which the run ended may become longer.
    parts = [part for part in data_phases(config.data, config.training) if part.phase.first_step < steps]
    corpora = [mixture.corpora for mixture in mixtures(config.data, config.training)]
    for part in parts:
        phase = part.phase
        rotary = phase.model(model)
        batch = (phase.training.seq_len, phase.training.global_batch_size)
        settings = (columns, *batch, rotary.rope_base, rotary.rope_scaling, corpora[part.mixture])
        end = steps if part is parts[-1] else phase.end_step
        if ranges and ranges[-1][1:] == settings:
            ranges.pop()
        ranges.append((end, *settings))
    return ranges


def check_same_run(
    recorded_yaml: str, wanted: Config, folder: Path, allowed: Sequence[str] = (), done: int | None = None
) -> list[Difference]:
    """The permitted changes with which the run in `folder` resumes; ConfigError lists those that are not permitted.

    recorded_yaml: text of its config.yaml: UNPROVEN, NOT_FINITE or nothing, then the output of `to_yaml`.
    allowed: keys of CHANGEABLE_ON_PURPOSE that may change, too.
    done: the completed steps with which it resumes; None: those of its newest checkpoint.
    """
    recorded = from_yaml(recorded_yaml, str(folder / "config.yaml"))
    changes = differences(recorded, in_order_of(recorded_yaml, wanted, folder))
    if recorded_yaml.startswith(UNPROVEN):
        return changes
    rates_too = recorded_yaml.startswith(NOT_FINITE)
    steps = saved_steps(folder) if done is None else done
    same_steps = _step_settings(recorded, steps) == _step_settings(wanted, steps)
    problems = [
        _refusal(item, recorded, wanted, folder, allowed, steps)
        for item in changes
        if not (item.may_change or (rates_too and item.is_learning_rate))
        and not (_is_allowed(item, allowed) and (same_steps or not _is_of_steps(item)))
    ]
    problems += _changes_text_of_shorter_sequences(
        recorded, in_order_of(recorded_yaml, wanted, folder), steps
    )
    if problems:
        raise ConfigError(problems)
    return changes


def check_allowed(allowed: Sequence[str], config: Config) -> None:
    """Raise ConfigError for keys of `--allow-change` that can never change within a run, or do not exist."""
    known = set(_keys(config.model_dump(mode="json")))
    problems = []
    for key in allowed:
        if f"{key}.".startswith(tuple(f"{one}." for one in (*CHANGEABLE_ON_PURPOSE, *_CHANGEABLE))):
            continue
        if key in known:
            why = _WHY_FIXED.get(key.partition(".")[0], "is fixed")
            reason = f"cannot change within a run: it {why}"
            remedy = f"start a new run, or allow one of {', '.join(CHANGEABLE_ON_PURPOSE)}"
        else:
            reason = "names no key"
            remedy = f"did you mean {nearest_first(key, [*CHANGEABLE_ON_PURPOSE], most=3)}?"
        problems.append(Problem("--allow-change", key, reason, remedy))
    if problems:
        raise ConfigError(problems)


def saved_steps(folder: Path) -> int:
    """The step of the newest checkpoint in the run folder, damaged or not; 0 without one."""
    names = (re.fullmatch(r"step_(\d+)", path.name) for path in (folder / "checkpoints").glob("step_*"))
    return max((int(name[1]) for name in names if name), default=0)


def _is_of_steps(item: Difference) -> bool:
    """Whether the key says what single steps read and compute, so that it is fixed for the steps that are done."""
    return f"{item.key}.".startswith(tuple(f"{key}." for key in _CHANGEABLE_AFTER_PLANNED_STEPS))


def _is_allowed(item: Difference, allowed: Sequence[str]) -> bool:
    allowed = [
        key
        for key in allowed
        if key in CHANGEABLE_ON_PURPOSE or key.startswith(("schedule.", "model.dropout."))
    ]
    if any(key in _CHANGEABLE_AFTER_PLANNED_STEPS and key != "data.stages" for key in allowed):
        allowed = [*allowed, "training.seq_len_schedule"]  # where the steps so far keep theirs
    return not item.regroups and f"{item.key}.".startswith(tuple(f"{key}." for key in allowed))


def _refusal(
    item: Difference, recorded: Config, wanted: Config, folder: Path, allowed: Sequence[str], steps: int
) -> Problem:
    """The error of a change that is not permitted, with the way to make it on purpose, if there is one."""
    remedy = f"set it back, or choose another run.name to start a new run beside {folder}"
    reason = f"was {item.recorded!r} when the run began"
    if item.regroups or not f"{item.key}.".startswith(tuple(f"{key}." for key in CHANGEABLE_ON_PURPOSE)):
        return Problem(item.key, item.wanted, reason, remedy)
    if not _is_allowed(item, allowed):
        remedy += f"; to change it from here on, add --allow-change {item.key}"
    elif item.key == "data.stages":
        reason = f"differs from {item.recorded!r} in the {steps} steps that the run has done"
        remedy = f"keep the stages of these steps; new ones may begin from_step {steps} on"
    elif _is_of_steps(item):
        reason = f"was {item.recorded!r} in the {steps} steps that the run has done"
        remedy = f"keep them: training.seq_len_schedule='{_phases_until(recorded, wanted, steps)}'"
    return Problem(item.key, item.wanted, reason, remedy)


def _phases_until(recorded: Config, wanted: Config, steps: int) -> str:
    """The seq_len_schedule of the first `steps` steps of the recorded run, as a YAML value on one line."""
    entries = []
    for phase in recorded.training.phases:
        if phase.first_step >= steps:
            break
        until = steps if phase.schedule_entry is None else min(phase.end_step, steps)
        entry: dict[str, Any] = {"until_step": until, "seq_len": phase.training.seq_len}
        entry["global_batch_size"] = phase.training.global_batch_size
        rotary, now = phase.model(recorded.model), wanted.model
        if rotary.rope_base != now.rope_base:
            entry["rope_base"] = rotary.rope_base
        if rotary.rope_scaling != now.rope_scaling:
            entry["rope_scaling"] = rotary.rope_scaling.model_dump(mode="json", exclude_defaults=True) or {
                "kind": "none"
            }
        entries.append(entry)
    return str(entries).replace("'", "")


def in_order_of(recorded_yaml: str, wanted: Config, folder: Path) -> Config:
    """`wanted` with the order of text with which the run in `folder` began, unless no step has succeeded yet.

    That is data.blend, data.unread_first, where each sequence length was to end, and for a run of an earlier version,
    whose corpora without weights had equal ones, these.
    """
    if recorded_yaml.startswith(UNPROVEN):
        return wanted
    config = from_yaml(recorded_yaml, str(folder / "config.yaml"))
    recorded, ends = config.data, length_ends(wanted.training)
    planned = {
        length: recorded.order.planned_until.get(length, end)
        for length, end in length_ends(config.training).items()
    }
    moved = {length: end for length, end in planned.items() if ends.get(length, end) != end}
    changes: dict[str, Any] = {
        "blend": recorded.blend,
        "unread_first": recorded.unread_first,
        "order": TextOrder(planned_until=moved),
    }
    for key in ("train", "validation"):
        before, now = getattr(recorded, key) or [], getattr(wanted.data, key) or []
        have_equal_weights = all(corpus.weight == 1 for corpus in before)
        same_paths = [corpus.path for corpus in before] == [corpus.path for corpus in now]
        without_weights = all(corpus.weight is None for corpus in now)
        if recorded.blend == "periodic" and have_equal_weights and same_paths and without_weights:
            changes[key] = getattr(recorded, key)
    return wanted.model_copy(update={"data": wanted.data.model_copy(update=changes)})


def _changes_text_of_shorter_sequences(recorded: Config, wanted: Config, steps: int) -> Iterator[Problem]:
    """The problem of another mixture in a sequence length that the run has begun and that others follow.

    How much of each corpus such a length takes, so that longer sequences find the rest unread, was decided before its
    first step.
    """
    before, now = (mixtures(config.data, config.training) for config in (recorded, wanted))
    starts = sorted({mixture.first_step for mixture in (*before, *now)})
    changed = [
        step
        for step in starts
        if before[mixture_at(step, before)].corpora != now[mixture_at(step, now)].corpora
    ]
    if not changed or not wanted.data.unread_first:
        return
    length = wanted.training.phase_of(changed[0]).training.seq_len
    parts = [
        part
        for part in data_phases(wanted.data, wanted.training)
        if part.phase.training.seq_len == length and part.planned_end is not None
    ]
    if parts and parts[0].phase.first_step < steps:
        end = parts[-1].phase.end_step
        reason = (
            f"changes what sequences of {length} tokens read, from step {changed[0]} on, and the text of all {end} "
            "steps until longer ones was chosen when the run began"
        )
        yield Problem("data.stages", "[...]", reason, f"let the new stage begin from_step {end} on")


def in_recorded_order(wanted: Config) -> Config:
    """`in_order_of` the run in the folder of `wanted`, if there is one."""
    file = wanted.run.folder / "config.yaml"
    return in_order_of(read_text(file), wanted, wanted.run.folder) if file.exists() else wanted


def _keys(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """All keys and sections of a tree, dotted."""
    for key, value in tree.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")


def _changed(old: dict[str, Any], new: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any, Any]]:
    for key in dict.fromkeys((*old, *new)):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _changed(before, after, f"{prefix}{key}.")
        elif before != after:
            yield prefix + key, before, after


def check_recorded_run(wanted: Config, allowed: Sequence[str] = (), done: int | None = None) -> bool:
    """Apply `check_same_run` to the run in the folder of `wanted`; whether there is one."""
    check_allowed(allowed, wanted)
    file = wanted.run.folder / "config.yaml"
    if not file.exists():
        return False
    check_same_run(read_text(file), wanted, wanted.run.folder, allowed, done)
    return True
