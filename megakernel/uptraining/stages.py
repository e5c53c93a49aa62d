"""What `megakernel uptrain` does, as training runs that start from each other."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from data_pipeline.order import ConsumptionOrder, Share
from megakernel.checkpoint.conversion import rank_steps
from megakernel.config import (
    Attention,
    BlockCompression,
    Config,
    ConfigError,
    Model,
    Problem,
    Training,
    Uptrain,
    data_parallel_size,
)
from megakernel.config.section import merged
from megakernel.config.validation import validate


@dataclass(frozen=True)
class Stage:
    """One training run inside the folder of an up-training."""

    kind: str
    """What is trained: transfer, base, rankR, main, length, scratch or dense."""

    number: int
    """Its place among the stages, from 1."""

    purpose: str
    """What it is for, in a few words."""

    config: Config
    """The run; it starts from the stage before, the first from the dense model."""

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.number}-{self.kind}"

    @property
    def is_control(self) -> bool:
        """Whether it is trained for comparison alone: nothing starts from it."""
        return self.kind in _CONTROLS


def stages(config: Config, kept: Sequence[int] | None = None, dense: Model | None = None) -> list[Stage]:
    """The stages of a configuration with an uptrain section, in order.

    Sequences of one length are one stream: each stage reads on where the one before stopped, so that no sequence comes
    twice within an epoch, and what is trained for comparison reads the same sequences, from the first. Where sequences
    grow, in the length stage or by a seq_len_schedule, a stage draws an order of its own.

    kept: the layers that stay softmax; None: not chosen yet, which only the transfer before the choice needs not know.
    dense: the model section of init.from, which uptrain.train_dense needs; without it layers that are kept see all.

    Raises ConfigError for a stage whose configuration cannot be, naming the stage.
    """
    uptrain = config.uptrain or Uptrain()
    chosen = uptrain.layers.keep if kept is None else list(kept)
    found: list[Stage] = []
    passed = 0
    for purpose, kind, changes in _changes(config, uptrain, dense):
        if kind == "transfer" and isinstance(uptrain.layers.keep, int):
            pattern = None
        elif isinstance(chosen, int):
            break
        else:
            pattern = _pattern(chosen, config.model.num_layers, dense)
        number = len(found) + 1
        control = kind in _CONTROLS
        start = config.init.source if control or not found else found[-1].config.run.folder
        follows = not config.training.seq_len_schedule and kind != "length"
        seed = config.run.seed if follows else config.run.seed + number
        own: dict[str, Any] = {
            "run": {"name": f"{number}-{kind}", "root": str(config.run.folder), "seed": seed},
            "init": {
                "from": None if kind == "scratch" else str(start),
                "moments": _moments(kind, found, config),
            },
            "uptrain": None,
        }
        if pattern is not None and kind != DENSE:
            own["model"] = {"attention_pattern": pattern}
        if kind == "length":
            own["training"] = {"skip_samples": []}  # which are of another stream
        elif follows and passed and not control:
            own["training"] = {"skip_samples": [(0, passed), *config.training.skip_samples]}
        with _named(f"{number}-{kind}"):
            run = validate(merged(merged(config.model_dump(mode="json"), changes), own))
        found.append(Stage(kind, number, purpose, run))
        passed = ConsumptionOrder(run.training.phases[-1], Share()).stream_length(run.training.steps)
    return found


@contextmanager
def _named(stage: str) -> Iterator[None]:
    """Within, a ConfigError names the stage that it is of."""
    try:
        yield
    except ConfigError as error:
        where = f"(stage {stage} of uptrain)"
        raise ConfigError(
            [replace(problem, reason=f"{problem.reason} {where}") for problem in error.problems]
        ) from None


def check_stages(config: Config, world_size: int) -> None:
    """Raise ConfigError for a stage that cannot be, before any is run; layers that are chosen later stand as the first.

    The layers of the dense model count as softmax: what depends on their windows is left to `stages`.
    """
    if (dropout := config.training.near_dropout) is not None:
        # No rule of the configuration, because runs of before have recorded both.
        remedy = f"set null, and uptrain.near_dropout: {dropout.start:g}"
        reason = "is what stages of uptrain choose, by which of them have gates"
        raise ConfigError([Problem("training.near_dropout", "{...}", reason, remedy)])
    keep = (config.uptrain or Uptrain()).layers.keep
    dense = config.model.model_copy(update={"attention": Attention(), "attention_pattern": None})
    for stage in stages(config, range(keep) if isinstance(keep, int) else keep, dense):
        with _named(stage.name):
            data_parallel_size(stage.config, world_size)


def _moments(kind: str, before: Sequence[Stage], config: Config) -> str | None:
    """Where a stage's optimizer goes on: in the stage before, if that trained what it trains.

    Low-rank updates are folded between stages, and begin anew.
    """
    if kind in ("transfer", "scratch"):
        return None
    trained = [stage for stage in before if stage.config.objective.kind != "transfer"]
    if kind == DENSE or not (trained or config.optimizer.updates):
        return None if config.init.moments is None else str(config.init.moments)
    return None if config.optimizer.updates else str(trained[-1].config.run.folder)


MAIN = "main"
DENSE = "dense"
"""Kinds of stages: what the configuration describes, and the dense model trained on."""

_CONTROLS = ("scratch", DENSE)
"""Those that are trained for comparison alone."""


def _changes(
    config: Config, uptrain: Uptrain, dense: Model | None
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Purpose, name and changed keys of each stage."""
    attention = config.model.attention
    ladder = _ranks_between(attention) if uptrain.annealed else []
    shares = _shares(config.training.steps, uptrain, len(ladder))
    distill = _distillation(config, uptrain)
    first = _base(attention, uptrain.base) if uptrain.alpha else attention
    if uptrain.transfer is not None:
        transfer = uptrain.transfer
        yield (
            "attention transfer",
            "transfer",
            {
                "model": {"attention": _plain(first)},
                "objective": {
                    "kind": "transfer",
                    "teacher": str(config.init.source),
                    "rows": transfer.rows,
                    "cross_entropy": transfer.cross_entropy,
                },
                "training": {"steps": transfer.steps, "seq_len_schedule": []},
                "optimizer": {
                    "lr": transfer.lr,
                    "mechanism_lr": None,
                    "trained": "mechanism",
                    "lora": None,
                },
                # ZeRO 3 saves no weights that stay as they are.
                "parallel": {"zero_stage": min(config.parallel.zero_stage, 2)},
            },
        )
    parts: list[tuple[str, str, Attention]] = []
    if uptrain.alpha:
        parts.append((f"{uptrain.base} base", "base", first))
    parts += [(f"rank {rank}", f"rank{rank}", _with_rank(attention, rank)) for rank in ladder]
    parts.append(("distillation" if uptrain.distill.kl else "fine-tuning", MAIN, attention))
    before, dropout = 0, uptrain.near_dropout
    for (purpose, kind, of), count in zip(parts, shares, strict=True):
        # One schedule of the learning rate over all of them, and one of the sequences' lengths.
        after = config.training.steps - before - count
        schedule = {"steps_before": before, "steps_after": after}
        gated = config.model.model_copy(update={"attention": of}).is_gated
        training = {
            "steps": count,
            "seq_len_schedule": _rows(config.training, before, before + count),
            "near_dropout": {"start": dropout, "steps": count} if dropout and gated else None,
        }
        model = {"attention": _plain(of)}
        yield (
            purpose,
            kind,
            {"model": model, "training": training, "schedule": schedule, "objective": distill},
        )
        before, dropout = before + count, 0.0 if gated else dropout
    if uptrain.length is not None:
        length = uptrain.length.model_dump(mode="json", exclude_none=True)
        length.pop("rope_scaling", None)
        rate = length.pop("lr", None)
        changes: dict[str, Any] = {"training": length}
        if uptrain.length.rope_scaling is not None:
            # With every key of it: nothing of the model's own is left among them.
            changes["model"] = {"rope_scaling": uptrain.length.rope_scaling.model_dump(mode="json")}
        if rate is not None:
            own = config.optimizer.mechanism_lr
            scaled = None if own is None else own * rate / config.optimizer.lr
            changes["optimizer"] = {"lr": rate, "mechanism_lr": scaled}
        yield "longer rows", "length", changes
    # The transfer reads sequences of the last length.
    total = config.training.steps + (uptrain.transfer.steps if uptrain.transfer is not None else 0)
    budget = {"steps": total, "seq_len_schedule": _rows(config.training, 0, config.training.steps)}
    all_weights: dict[str, Any] = {"trained": "all", "lora": None}
    if uptrain.from_scratch:
        rates: dict[str, Any] = {}
        if uptrain.scratch_lr is not None:  # no weight is newer than another
            rates = {"lr": uptrain.scratch_lr, "mechanism_lr": None}
        changes = {"training": budget, "optimizer": all_weights | rates}
        yield "from scratch on as many tokens", "scratch", changes
    if uptrain.train_dense:
        assert dense is not None, "the caller knows init.from"
        layers = [_plain(layer) for layer in dense.attentions]
        changes = {
            "model": {"attention_pattern": layers},
            "training": budget,
            "optimizer": all_weights | {"mechanism_lr": None},
        }
        yield "dense, trained on as many tokens", DENSE, changes


def _distillation(config: Config, uptrain: Uptrain) -> dict[str, Any]:
    """The objective of the stages that train all weights; without KL no teacher is loaded."""
    weights = uptrain.distill
    if weights.kl == 0:
        return {"kind": "labels"}
    return {
        "kind": "distill",
        **weights.model_dump(mode="json"),
        "teacher": str(weights.teacher or config.init.source),
    }


def _shares(steps: int, uptrain: Uptrain, ranks: int) -> list[int]:
    """Steps of the base, of each of the ranks between, and of the configured model: together those of training.

    Raises ConfigError where one of them would have none.
    """
    base = [round(uptrain.alpha * steps)] if uptrain.alpha else []
    annealed = round((uptrain.alpha + uptrain.annealed) * steps) - sum(base) if ranks else 0
    between = [annealed * (rank + 1) // ranks - annealed * rank // ranks for rank in range(ranks)]
    shares = [*base, *between, steps - sum(base) - annealed]
    if min(shares) < 1:
        reason = f"leaves a stage without a step: uptrain has {len(shares)} that share them, as {shares}"
        remedy = "set more, or other shares (uptrain.alpha and uptrain.anneal)"
        raise ConfigError([Problem("training.steps", steps, reason, remedy)])
    return shares


def _rows(training: Training, first: int, end: int) -> list[dict[str, Any]]:
    """The seq_len_schedule of steps [first, end) of training, counted from `first`."""
    return [
        phase.written.model_dump(mode="json") | {"until_step": min(phase.end_step, end) - first}
        for phase in training.phases
        if phase.written is not None and phase.first_step < end and phase.end_step > first
    ]


def _base(attention: Attention, kind: str) -> Attention:
    """The half of FLuRKA that is trained first.

    kernel: every token of an earlier block is a landmark of its own, E = F = I, so that nothing is compressed; with
    a kernel window that is kernel attention itself. low_rank: the same landmarks under softmax, one normalizer.
    """
    assert isinstance(attention.compression, BlockCompression)
    if kind == "kernel":
        return _with_rank(attention, attention.compression.block_size)
    tree = _plain(attention) | {"similarity": "softmax", "feature_map": None, "far_decay": "none"}
    tree["near"] = tree["near"] | {"kind": "softmax", "join": "shared"}
    return Attention.model_validate(tree)


def _with_rank(attention: Attention, rank: int) -> Attention:
    tree = _plain(attention)
    return Attention.model_validate(tree | {"compression": tree["compression"] | {"rank": rank}})


def _ranks_between(attention: Attention) -> list[int]:
    """Landmarks of a block between one for each token and the configured rank: 64 -> [32, 16] for rank 8."""
    assert isinstance(attention.compression, BlockCompression)
    return rank_steps(attention.compression.block_size, attention.compression.rank)[1:-1]


def _pattern(kept: Sequence[int], num_layers: int, dense: Model | None) -> list[Any] | None:
    """Layers that are `kept` as the dense model has them, windows included."""
    if not kept:
        return None
    same = [
        "softmax" if dense is None else _plain(dense.layer_attention(layer)) for layer in range(num_layers)
    ]
    return [same[layer] if layer in kept else "main" for layer in range(num_layers)]


def _plain(attention: Attention) -> dict[str, Any]:
    return attention.model_dump(mode="json")
