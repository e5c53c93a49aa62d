"""Loads what a start begins from: the run's newest good checkpoint, or weights of another run or model."""

from collections.abc import Callable, Sequence
from pathlib import Path

from data_pipeline.corpus import Corpora
from megakernel.checkpoint.adapter import read_adapter
from megakernel.checkpoint.dense import DenseCheckpoint
from megakernel.checkpoint.files import CheckpointTensors
from megakernel.checkpoint.folder import CheckpointFolder
from megakernel.checkpoint.sharded_load import Comparison
from megakernel.checkpoint.weight_source import WeightSource
from megakernel.checkpoint.whole_tensors import WholeTensors
from megakernel.config import Lora, Model, UserError
from megakernel.model.self_attention import absent_in_dense
from megakernel.parallel.ranks import Ranks

from .engine import Engine

Note = Callable[[str], None]


def resume(
    engine: Engine, checkpoints: CheckpointFolder, layout: dict[str, int], ranks: Ranks, note: Note
) -> int:
    """Load the newest good checkpoint of any layout, if there is one; returns its step, else 0."""
    for leftover in checkpoints.remove_leftovers():
        note(f"removed {leftover}, which was not written to its end")
    search = checkpoints.newest_good()
    for folder, reason in search.broken.items():
        note(f"{folder} cannot be used ({reason}); taking the one before")
    if search.checkpoint is None:
        return 0
    folder, written = search.checkpoint.folder, search.checkpoint.progress.layout
    if written == layout:
        engine.load(folder)
    else:
        changes = [f"{key} {written[key]} -> {layout[key]}" for key in layout if written[key] != layout[key]]
        note(f"reshaping {folder}: {', '.join(changes)}")
        tensors = CheckpointTensors(search.checkpoint, ranks)
        engine.load_tensors(tensors)
        counts = ranks.all(lambda: tensors.bytes_read)
        note(
            f"{ranks.size} ranks read {sum(counts):,} bytes, at most {max(counts):,} each, of "
            f"{sum(record.size for record in search.checkpoint.files.values()):,}"
        )
    note(f"continuing from {folder}")
    return search.checkpoint.step


def start_from_weights(
    source: Path, model: Model, corpora: Corpora, engine: Engine, ranks: Ranks, note: Note
) -> None:
    """Load weights without optimizer state from a run's newest good checkpoint, a checkpoint folder or a dense model.

    Prints which weights are newly initialized and which are left out. A dense model must have all weights but those of
    attention mechanisms, and no others. Mechanisms' weights are converted if possible, such as E and F to fewer
    landmarks. Raises UserError, alike on all ranks, if there is no checkpoint, the model does not match, or the data
    was prepared with another tokenizer.
    """
    weights = WeightSource.find("init.from", source, ranks)
    if remark := ranks.on_rank_zero(lambda: weights.check_tokenizer(corpora)):
        note(remark)
    tensors = weights.tensors(model, ranks)
    comparison = engine.load_weights(tensors)
    check_weights(weights, tensors, comparison, model, engine.engine.module.settings.vocab_size)
    note(f"weights from {source}")
    for names, what in (
        (comparison.missing, "missing there and new here"),
        (comparison.unexpected, "left out"),
    ):
        if names:
            note(f"{len(names)} weights {what}: {in_layers(names)}")


def check_weights(
    weights: WeightSource, tensors: WholeTensors, comparison: Comparison, model: Model, vocab_size: int
) -> None:
    """Raise UserError, one line per reason, if the weights of init.from do not match the model.

    tensors: the source's, converted for the model. comparison: with the model's weights. vocab_size: of the data.
    """
    refused = tensors.differing_keys(model) if isinstance(tensors, DenseCheckpoint) else []
    remedy = "give the model the checkpoint's sizes, or choose another checkpoint"
    misfits = [*weights.vocab_size_mismatch(vocab_size), *comparison.misshapen]
    refused += [f"{line}; {remedy}" for line in misfits]
    if isinstance(tensors, DenseCheckpoint):
        lost = [name for name in comparison.missing if not absent_in_dense(name)]
        refused += [f"{name} of the model is not in the checkpoint; {remedy}" for name in lost]
        refused += [
            f"{name} of the checkpoint is not in the model; {remedy}" for name in comparison.unexpected
        ]
    if refused:
        raise UserError("\n".join(f"{weights.key}={weights.folder}: {line}" for line in refused))


def start_with_adapter(
    folder: Path, model: Model, lora: Lora, engine: Engine, ranks: Ranks, note: Note
) -> None:
    """Load low-rank updates from a PEFT adapter, after their weights.

    Raises UserError, alike on all ranks, if the folder has none or its updates are not those of the run.
    """
    adapter = ranks.on_rank_zero(lambda: read_adapter(folder, model, lora))
    engine.load_weights(adapter)
    note(f"low-rank updates of {len(adapter.names) // 2} matrices from {folder}")


def in_layers(names: Sequence[str]) -> str:
    """Parameter names, those that differ only in the layer as one: `head.bias, {1,2}.mlp.fc1`."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layer, _, rest = name.partition(".")
        key, layer_numbers = (f".{rest}", [layer]) if layer.isdigit() else (name, [])
        layers.setdefault(key, []).extend(layer_numbers)
    return ", ".join(
        f"{{{','.join(of)}}}{name}" if len(of) > 1 else "".join(of) + name for name, of in layers.items()
    )


def find_moments(source: Path, ranks: Ranks, optimizer: str = "adamw") -> WeightSource:
    """The run or checkpoint of init.moments. Raises UserError, alike on all ranks, if it is neither.

    optimizer: optimizer.name of the run that starts from it, which must be its own.
    """
    weights = WeightSource.find("init.moments", source, ranks)
    if weights.checkpoint is None:
        raise UserError(
            f"init.moments={source} is a dense model without AdamW's moments; give a run of this project, or remove it"
        )
    if weights.optimizer != optimizer:
        raise UserError(
            f"init.moments={source}: {weights.optimizer} trained it, whose moments are not those of optimizer.name="
            f"{optimizer}; set that to {weights.optimizer}, or remove init.moments"
        )
    return weights


def start_with_moments(source: Path, model: Model, engine: Engine, ranks: Ranks, note: Note) -> None:
    """Load AdamW's moments, for weights that fit, from a run's newest good checkpoint or a checkpoint folder.

    Raises UserError, alike on all ranks, if there is no checkpoint or none of its moments fits the model.
    """
    weights = find_moments(source, ranks, engine.config.optimizer.name)
    count = engine.load_moments(weights.tensors(model, ranks))
    if not count:
        raise UserError(
            f"init.moments={source}: it holds no AdamW moments of this model's weights; give a run of this project "
            "that trained them, or remove init.moments"
        )
    note(f"AdamW's moments of {count} weights from {source}")
