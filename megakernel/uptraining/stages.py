"""What `megakernel uptrain` does, as training runs that start from each other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megakernel.config import Attention, BlockCompression, Config, Uptrain
from megakernel.config.merging import merged
from megakernel.config.validation import validate

from .landmarks import rank_steps


@dataclass(frozen=True)
class Stage:
    """One training run inside the folder of an up-training."""

    name: str
    """Name of its folder, which begins with its number."""

    purpose: str
    """What it is for, in a few words."""

    config: Config
    """The run; it starts from the stage before, the first from the dense model."""

    is_control: bool = False
    """Trained for comparison alone: nothing starts from it."""


def stages(config: Config, kept: Sequence[int] | None = None) -> list[Stage]:
    """The stages of a configuration with an uptrain section, in order.

    kept: the layers that stay softmax; None: not chosen yet, which only the transfer before the choice needs not know.
    """
    uptrain = config.uptrain or Uptrain()
    chosen = uptrain.layers.keep if kept is None else list(kept)
    found: list[Stage] = []
    for purpose, short, changes in _changes(config, uptrain):
        if short == "transfer" and isinstance(uptrain.layers.keep, int):
            pattern = None
        elif isinstance(chosen, int):
            break
        else:
            pattern = _pattern(chosen, config.model.num_layers)
        number = len(found) + 1
        control = short == "scratch"
        start = found[-1].config.run.folder if found else config.init.source
        own: dict[str, Any] = {
            "run": {
                "name": f"{number}-{short}",
                "root": str(config.run.folder),
                "seed": config.run.seed + number,
            },
            "init": {"from": None if control else str(start)},
            "uptrain": None,
        }
        if pattern is not None:
            own["model"] = {"attention_pattern": pattern}
        tree = merged(merged(_tree(config), changes), own)
        found.append(Stage(f"{number}-{short}", purpose, validate(tree), control))
    return found


def _changes(config: Config, uptrain: Uptrain) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Purpose, name and changed keys of each stage."""
    attention = config.model.attention
    steps = config.training.steps
    base_steps = round(uptrain.alpha * steps)
    distill = _distillation(config, uptrain)
    first = _base(attention, uptrain.base) if base_steps else attention
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
            },
        )
    main_dropout, base_dropout = uptrain.near_dropout, 0.0
    if base_steps:
        main_dropout, base_dropout = 0.0, uptrain.near_dropout
        yield f"{uptrain.base} base", "base", _trained(first, base_steps, distill, base_dropout)
    ladder = _ranks_between(attention) if base_steps and uptrain.annealed else []
    each = max(1, round(uptrain.annealed * steps / len(ladder))) if ladder else 0
    for rank in ladder:
        yield f"rank {rank}", f"rank{rank}", _trained(_with_rank(attention, rank), each, distill)
    main_steps = max(1, steps - base_steps - each * len(ladder))
    yield (
        "distillation" if uptrain.distill.kl else "fine-tuning",
        "main",
        _trained(attention, main_steps, distill, main_dropout),
    )
    if uptrain.length is not None:
        length = uptrain.length.model_dump(mode="json", exclude_none=True)
        rope_scaling, rate = length.pop("rope_scaling", None), length.pop("lr", None)
        changes: dict[str, Any] = {"training": length}
        if rope_scaling is not None:
            changes["model"] = {"rope_scaling": rope_scaling}
        if rate is not None:
            changes["optimizer"] = {"lr": rate}
        yield "longer rows", "length", changes
    if uptrain.from_scratch:
        total = steps + (uptrain.transfer.steps if uptrain.transfer is not None else 0)
        optimizer: dict[str, Any] = {"trained": "all", "lora": None}
        if uptrain.scratch_lr is not None:
            optimizer["lr"] = uptrain.scratch_lr
        changes = {"training": {"steps": total}, "optimizer": optimizer}
        yield "from scratch on as many tokens", "scratch", changes


def _distillation(config: Config, uptrain: Uptrain) -> dict[str, Any]:
    """The objective of the stages that train all weights; without KL no teacher is loaded."""
    weights = uptrain.distill
    if weights.kl == 0:
        return {"kind": "labels"}
    return {
        "kind": "distill",
        "teacher": str(config.init.source),
        **weights.model_dump(mode="json"),
    }


def _trained(
    attention: Attention, steps: int, objective: dict[str, Any], near_dropout: float = 0.0
) -> dict[str, Any]:
    dropout = {"start": near_dropout, "steps": steps} if near_dropout and _has_gates(attention) else None
    return {
        "model": {"attention": _plain(attention)},
        "training": {"steps": steps, "near_dropout": dropout},
        "objective": objective,
    }


def _has_gates(attention: Attention) -> bool:
    near = attention.near
    kernel = attention.similarity == "kernel"
    return kernel and near is not None and near.kind == "softmax" and near.join == "gated"


def _base(attention: Attention, kind: str) -> Attention:
    """The half of FLuRKA that is trained first.

    kernel: every token of an earlier block is a landmark of its own, E = F = I, so that nothing is compressed; with
    a kernel window that is kernel attention itself. low_rank: the same landmarks under softmax, one normalizer.
    """
    assert isinstance(attention.compression, BlockCompression)
    if kind == "kernel":
        return _with_rank(attention, attention.compression.block_size)
    tree = _plain(attention) | {"similarity": "softmax", "feature_map": None}
    tree["near"] = tree["near"] | {"kind": "softmax", "join": "shared"}
    return Attention.model_validate(tree)


def _with_rank(attention: Attention, rank: int) -> Attention:
    tree = _plain(attention)
    return Attention.model_validate(tree | {"compression": tree["compression"] | {"rank": rank}})


def _ranks_between(attention: Attention) -> list[int]:
    """Landmarks of a block between one for each token and the configured rank: 64 -> [32, 16] for rank 8."""
    assert isinstance(attention.compression, BlockCompression)
    return rank_steps(attention.compression.block_size, attention.compression.rank)[1:-1]


def _pattern(kept: Sequence[int], num_layers: int) -> list[str] | None:
    if not kept:
        return None
    return ["softmax" if layer in kept else "main" for layer in range(num_layers)]


def _plain(attention: Attention) -> dict[str, Any]:
    return attention.model_dump(mode="json")


def _tree(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json")
