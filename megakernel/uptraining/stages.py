"""The stages of `megakernel uptrain`: training runs, each of which starts from the one before."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from data_pipeline.order import ConsumptionOrder, Share
from megakernel.checkpoint.conversion import rank_steps
from megakernel.checkpoint.trained_run import CONTROLS, DENSE
from megakernel.config import (
    Attention,
    BlockCompression,
    Config,
    ConfigError,
    Model,
    Optimizer,
    Problem,
    Training,
    Uptrain,
    data_parallel_size,
    expand_preset,
)
from megakernel.config.model import Dropout
from megakernel.config.section import merged
from megakernel.config.uptrain import LengthStage, TransferStage
from megakernel.config.validation import validate


@dataclass(frozen=True)
class Stage:
    """One training run in the folder of an up-training."""

    kind: str
    """transfer, base, rankR, main, length, scratch or dense."""

    number: int
    """Its number among the stages, from 1."""

    purpose: str
    """Short description for tables and messages."""

    config: Config
    """Configuration of the run, which starts from the stage before, the first from the dense model."""

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.number}-{self.kind}"

    @property
    def is_control(self) -> bool:
        """Whether it is trained only for comparison; no stage starts from it."""
        return self.kind in CONTROLS


def stages(config: Config, kept: Sequence[int] | None = None, dense: Model | None = None) -> list[Stage]:
    """The stages of a configuration with an uptrain section, in order.

    Stages share one order of the data: each reads on where the one before stopped, so that no sequence comes twice
    within an epoch; controls read the same sequences from the first. If sequences grow, in the length stage or by a
    seq_len_schedule, a stage has an order of its own.

    kept: the layers that stay softmax; None: uptrain.layers.keep; if that is a number, stages end with the transfer.
    dense: the model section of init.from, which uptrain.train_dense needs; without it kept layers are full softmax.

    Raises ConfigError, which names the stage, for a stage whose configuration is invalid.
    """
    uptrain = config.uptrain or Uptrain()
    chosen = uptrain.layers.keep if kept is None else list(kept)
    plan: list[Stage] = []
    consumed = 0
    for purpose, kind, changes in _stage_changes(config, uptrain, dense):
        if kind == "transfer" and isinstance(uptrain.layers.keep, int):
            pattern = None
        elif isinstance(chosen, int):
            break
        else:
            pattern = _pattern(chosen, config.model.num_layers, dense)
        number = len(plan) + 1
        control = kind in CONTROLS
        start = config.init.source if control or not plan else plan[-1].config.run.folder
        shares_order = not config.training.seq_len_schedule and kind != "length"
        seed = config.run.seed if shares_order else config.run.seed + number
        overrides: dict[str, Any] = {
            "run": {"name": f"{number}-{kind}", "root": str(config.run.folder), "seed": seed},
            "init": {
                "from": None if kind == "scratch" else str(start),
                "moments": _moments(kind, plan, config),
            },
            "uptrain": None,
        }
        if pattern is not None and kind != DENSE:
            overrides["model"] = {"attention_pattern": pattern}
        if kind == "length":
            overrides["training"] = {"skip_samples": []}  # they count in another order of the data
        elif shares_order and consumed and not control:
            overrides["training"] = {"skip_samples": [(0, consumed), *config.training.skip_samples]}
        with _naming(f"{number}-{kind}"):
            tree = merged(merged(config.model_dump(mode="json"), changes), overrides)
            run = validate(tree | {"model": _without_unused_positions(tree["model"])})
        plan.append(Stage(kind, number, purpose, run))
        consumed = ConsumptionOrder(run.training.phases[-1], Share()).stream_length(run.training.steps)
    return plan


def _without_unused_positions(model: dict[str, Any]) -> dict[str, Any]:
    """A model section without max_positions if nothing in it has parameters per position, such as a base stage's."""
    pattern = model["attention_pattern"] or ["main"]
    layers = [model["attention"] if entry == "main" else entry for entry in pattern]
    linformer = any(
        (expand_preset(layer).get("compression") or {}).get("kind") == "linformer" for layer in layers
    )
    return model if linformer or model["position"] == "learned" else model | {"max_positions": None}


@contextmanager
def _naming(stage: str) -> Iterator[None]:
    """Add the stage's name to a ConfigError."""
    try:
        yield
    except ConfigError as error:
        where = f"(stage {stage} of uptrain)"
        raise ConfigError(
            [replace(problem, reason=f"{problem.reason} {where}") for problem in error.problems]
        ) from None


def check_stages(config: Config, world_size: int) -> None:
    """Raise ConfigError if any stage is invalid, before the first one runs.

    If layers to keep are chosen later, it takes the first ones. It assumes that the dense model has full softmax; what
    depends on its windows is left to `stages`.
    """
    if (dropout := config.training.near_dropout) is not None:
        # Not a rule of the configuration, because older runs have recorded both.
        remedy = f"set null, and uptrain.near_dropout: {dropout.start:g}"
        reason = "is set by uptrain, for the stages that have gates"
        raise ConfigError([Problem("training.near_dropout", "{...}", reason, remedy)])
    keep = (config.uptrain or Uptrain()).layers.keep
    dense = config.model.model_copy(update={"attention": Attention(), "attention_pattern": None})
    for stage in stages(config, range(keep) if isinstance(keep, int) else keep, dense):
        with _naming(stage.name):
            data_parallel_size(stage.config, world_size)


def _moments(kind: str, before: Sequence[Stage], config: Config) -> str | None:
    """Where a stage's AdamW moments come from: the stage before, if that trained the same weights, or init.moments.

    Low-rank updates are folded between stages, and start anew.
    """
    if kind in ("transfer", "scratch"):
        return None
    trained = [stage for stage in before if stage.config.objective.kind != "transfer"]
    if kind == DENSE or not (trained or config.optimizer.updates):
        return None if config.init.moments is None else str(config.init.moments)
    return None if config.optimizer.updates else str(trained[-1].config.run.folder)


MAIN = "main"
"""Kind of the stage that trains the configured model."""


StageChanges: TypeAlias = tuple[str, str, dict[str, Any]]
"""Purpose, kind and changed keys of a stage."""


def _stage_changes(config: Config, uptrain: Uptrain, dense: Model | None) -> Iterator[StageChanges]:
    """The stages in order; ConfigError, before the first, for shares of the steps that leave one none."""
    main = _main_stages(config, uptrain)
    if uptrain.transfer is not None:
        yield _transfer_stage(config, uptrain, uptrain.transfer)
    yield from main
    if uptrain.length is not None:
        yield _length_stage(config.optimizer, uptrain.length)
    if uptrain.from_scratch:
        rates: dict[str, Any] = {}
        if uptrain.scratch_lr is not None:  # all weights are new, so mechanism_lr has no use
            rates = {"lr": uptrain.scratch_lr, "mechanism_lr": None}
        yield "from scratch on as many tokens", "scratch", _control(config, uptrain, rates)
    if uptrain.train_dense:
        assert dense is not None, "the caller knows init.from"
        changes = _control(config, uptrain, {"mechanism_lr": None})
        changes["model"] = {"attention_pattern": [_as_dict(layer) for layer in dense.attentions]}
        yield "dense, trained on as many tokens", DENSE, changes


def _transfer_stage(config: Config, uptrain: Uptrain, transfer: TransferStage) -> StageChanges:
    changes = {
        # It runs the teacher's layers, which drop nothing.
        "model": {
            "attention": _as_dict(_first_attention(config, uptrain)),
            "dropout": Dropout().model_dump(),
        },
        "objective": {
            "kind": "transfer",
            "teacher": str(config.init.source),
            "rows": transfer.rows,
            "cross_entropy": transfer.cross_entropy,
        },
        "training": {"steps": transfer.steps, "seq_len_schedule": []},
        "optimizer": {"lr": transfer.lr, "mechanism_lr": None, "trained": "mechanism", "lora": None},
        # ZeRO 3 does not save frozen weights.
        "parallel": {"zero_stage": min(config.parallel.zero_stage, 2)},
    }
    return "attention transfer", "transfer", changes


def _main_stages(config: Config, uptrain: Uptrain) -> list[StageChanges]:
    """The base, rankR and main stages, which share training.steps."""
    attention = config.model.attention
    ranks = _intermediate_ranks(attention) if uptrain.annealed and attention.near is not None else []
    parts: list[tuple[str, str, Attention]] = []
    if uptrain.alpha:
        parts.append((f"{uptrain.base} base", "base", _first_attention(config, uptrain)))
    parts += [(f"rank {rank}", f"rank{rank}", _with_rank(attention, rank)) for rank in ranks]
    parts.append(("distillation" if uptrain.distill.kl else "fine-tuning", MAIN, attention))
    stage_steps = _stage_steps(config.training.steps, uptrain, len(ranks))
    before, dropout = 0, uptrain.near_dropout
    found: list[StageChanges] = []
    for (purpose, kind, mechanism), count in zip(parts, stage_steps, strict=True):
        gated = config.model.model_copy(update={"attention": mechanism}).is_gated
        changes = {
            "model": {"attention": _as_dict(mechanism)},
            "training": {
                "steps": count,
                "seq_len_schedule": _phases(config.training, before, before + count),
                "near_dropout": {"start": dropout, "steps": count} if dropout and gated else None,
            },
            # All of them share one learning-rate schedule and one sequence-length schedule.
            "schedule": {
                "part": {"steps_before": before, "steps_after": config.training.steps - before - count}
            },
            "objective": _distillation(config, uptrain),
        }
        found.append((purpose, kind, changes))
        before, dropout = before + count, 0.0 if gated else dropout
    return found


def _length_stage(optimizer: Optimizer, stage: LengthStage) -> StageChanges:
    length = stage.model_dump(mode="json", exclude_none=True, exclude={"rope_scaling", "lr"})
    changes: dict[str, Any] = {"training": length}
    if stage.rope_scaling is not None:
        # With every key, so that none of the model's own remains.
        changes["model"] = {"rope_scaling": stage.rope_scaling.model_dump(mode="json")}
    if stage.lr is not None:
        rate = optimizer.mechanism_lr
        scaled = None if rate is None else rate * stage.lr / optimizer.lr
        changes["optimizer"] = {"lr": stage.lr, "mechanism_lr": scaled}
    return "longer sequences", "length", changes


def _control(config: Config, uptrain: Uptrain, rates: dict[str, Any]) -> dict[str, Any]:
    """Changes of a stage that trains all weights on as many tokens as the transfer and the main stages together."""
    # The transfer uses the final sequence length.
    total = config.training.steps + (uptrain.transfer.steps if uptrain.transfer is not None else 0)
    return {
        "training": {
            "steps": total,
            "seq_len_schedule": _phases(config.training, 0, config.training.steps),
        },
        "optimizer": {"trained": "all", "lora": None, **rates},
    }


def _first_attention(config: Config, uptrain: Uptrain) -> Attention:
    """The mechanism with which training begins."""
    attention = config.model.attention
    return _base(attention, uptrain.base) if uptrain.alpha else attention


def _distillation(config: Config, uptrain: Uptrain) -> dict[str, Any]:
    """The objective of the base, rankR and main stages; without KL no teacher is loaded."""
    weights = uptrain.distill
    if weights.kl == 0:
        return {"kind": "labels"}
    return {
        "kind": "distill",
        **weights.model_dump(mode="json"),
        "teacher": str(weights.teacher or config.init.source),
    }


def _stage_steps(steps: int, uptrain: Uptrain, ranks: int) -> list[int]:
    """Steps of the base, of each intermediate rank, and of the configured model, which add up to training.steps.

    Raises ConfigError if one of them would have no steps.
    """
    base = [round(uptrain.alpha * steps)] if uptrain.alpha else []
    annealed = round((uptrain.alpha + uptrain.annealed) * steps) - sum(base) if ranks else 0
    intermediate = [annealed * (rank + 1) // ranks - annealed * rank // ranks for rank in range(ranks)]
    counts = [*base, *intermediate, steps - sum(base) - annealed]
    if min(counts) < 1:
        reason = f"leaves a stage without a step: uptrain has {len(counts)} that share them, as {counts}"
        remedy = "set more, or other shares (uptrain.alpha and uptrain.anneal)"
        raise ConfigError([Problem("training.steps", steps, reason, remedy)])
    return counts


def _phases(training: Training, first: int, end: int) -> list[dict[str, Any]]:
    """The seq_len_schedule of steps [first, end) of training, counted from `first`."""
    return [
        phase.schedule_entry.model_dump(mode="json") | {"until_step": min(phase.end_step, end) - first}
        for phase in training.phases
        if phase.schedule_entry is not None and phase.first_step < end and phase.end_step > first
    ]


def _base(attention: Attention, kind: str) -> Attention:
    """The simpler mechanism that is trained before FLuRKA, as FLuRKA's section 4.2 does.

    kernel: FLuRKA's kernel without compression. Beside a near window that is one landmark per token of an earlier
    block, E = F = I; with a kernel window it is kernel attention. low_rank: the same landmarks with softmax, beside a
    window with one normalizer; without one that is Linformer, also of FLuRKA-EVA.
    """
    tree = _as_dict(attention)
    if attention.near is None and kind == "kernel":
        return Attention.model_validate(tree | {"compression": None, "far_rope": "none"})
    if kind == "kernel":
        assert isinstance(attention.compression, BlockCompression)
        return _with_rank(attention, attention.compression.block_size)
    tree |= {"mechanism": "algebra", "eva": None}
    tree |= {"similarity": "softmax", "feature_map": None, "far_decay": "none"}
    if attention.near is not None:
        tree["near"] = tree["near"] | {"kind": "softmax", "join": "shared"}
    return Attention.model_validate(tree)


def _with_rank(attention: Attention, rank: int) -> Attention:
    tree = _as_dict(attention)
    return Attention.model_validate(tree | {"compression": tree["compression"] | {"rank": rank}})


def _intermediate_ranks(attention: Attention) -> list[int]:
    """Numbers of landmarks between one per token and the configured rank: [32, 16] for block size 64 and rank 8."""
    assert isinstance(attention.compression, BlockCompression)
    return rank_steps(attention.compression.block_size, attention.compression.rank)[1:-1]


def _pattern(kept: Sequence[int], num_layers: int, dense: Model | None) -> list[Any] | None:
    """The attention_pattern with the `kept` layers as in the dense model, including their windows."""
    if not kept:
        return None
    same = [
        "softmax" if dense is None else _as_dict(dense.layer_attention(layer)) for layer in range(num_layers)
    ]
    return [same[layer] if layer in kept else "main" for layer in range(num_layers)]


def _as_dict(attention: Attention) -> dict[str, Any]:
    return attention.model_dump(mode="json")
