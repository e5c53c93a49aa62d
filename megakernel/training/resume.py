"""Where a start of a run begins: its newest good checkpoint, weights of another run, or the first step."""

from collections.abc import Callable, Sequence
from pathlib import Path

from data_pipeline.corpus import Corpora
from megakernel.checkpoint.adapter import read_adapter
from megakernel.checkpoint.dense import DenseCheckpoint
from megakernel.checkpoint.folder import CheckpointFolder
from megakernel.checkpoint.reshape import reshape
from megakernel.checkpoint.universal import WholeTensors
from megakernel.checkpoint.universal_load import Comparison
from megakernel.checkpoint.weight_source import WeightSource
from megakernel.config import Lora, Model, UserError
from megakernel.model.self_attention import is_new
from megakernel.parallel.ranks import Ranks

from .engine import Engine

Note = Callable[[str], None]


def resume(
    engine: Engine, checkpoints: CheckpointFolder, layout: dict[str, int], ranks: Ranks, note: Note
) -> int:
    """Load the newest good checkpoint, if any, whatever layout wrote it; returns the steps it has behind it."""
    for leftover in checkpoints.remove_leftovers():
        note(f"removed {leftover}, which was not written to its end")
    found = checkpoints.newest_good()
    for folder, reason in found.broken.items():
        note(f"{folder} cannot be used ({reason}); taking the one before")
    if found.checkpoint is None:
        return 0
    folder, written = found.checkpoint.folder, found.checkpoint.progress.layout
    if written == layout:
        engine.load(folder)
    else:
        changes = [f"{key} {written[key]} -> {layout[key]}" for key in layout if written[key] != layout[key]]
        note(f"reshaping {folder}: {', '.join(changes)}")
        engine.load_universal(reshape(found.checkpoint, ranks))
    note(f"continuing from {folder}")
    return found.checkpoint.step


def start_from_weights(
    source: Path, model: Model, corpora: Corpora, engine: Engine, ranks: Ranks, note: Note
) -> None:
    """Take the weights alone: of a run's newest good checkpoint, of a checkpoint folder, or of a dense model.

    Says which weights stay as they were drawn, and which were left out; a dense model has to give all but those of
    attention mechanisms, and to have no others. What mechanisms own is made from that of the checkpoint's mechanisms
    where it can be, such as E and F for fewer landmarks.
    Raises UserError, alike on all ranks, where there is no checkpoint, the model is another one, or the data was
    prepared with another tokenizer.
    """
    found = WeightSource.find("init.from", source, ranks)
    if remark := ranks.first(lambda: found.check_tokenizer(corpora)):
        note(remark)
    tensors = found.tensors(model)
    comparison = engine.load_weights(tensors)
    check_weights(found, tensors, comparison, model, engine.engine.module.settings.vocab_size)
    note(f"weights from {source}")
    for names, what in (
        (comparison.missing, "missing there and new here"),
        (comparison.unexpected, "left out"),
    ):
        if names:
            note(f"{len(names)} weights {what}: {in_layers(names)}")


def check_weights(
    found: WeightSource, tensors: WholeTensors, comparison: Comparison, model: Model, vocab_size: int
) -> None:
    """Raise UserError, a line for each reason, where weights found by init.from are not those of a model.

    tensors: of the source, for the model. comparison: of them with the model's. vocab_size: of the data.
    """
    refused = tensors.unlike(model) if isinstance(tensors, DenseCheckpoint) else []
    remedy = "give the model the checkpoint's sizes, or choose another checkpoint"
    misfits = [*found.other_vocab_size(vocab_size), *comparison.misshapen]
    refused += [f"{line}; {remedy}" for line in misfits]
    if isinstance(tensors, DenseCheckpoint):
        lost = [name for name in comparison.missing if not is_new(name)]
        refused += [f"{name} of the model is not in the checkpoint; {remedy}" for name in lost]
        refused += [
            f"{name} of the checkpoint is not in the model; {remedy}" for name in comparison.unexpected
        ]
    if refused:
        raise UserError("\n".join(f"{found.key}={found.folder}: {line}" for line in refused))


def start_with_adapter(
    folder: Path, model: Model, lora: Lora, engine: Engine, ranks: Ranks, note: Note
) -> None:
    """Take low-rank updates from an adapter in PEFT's form, behind the weights that they are of.

    Raises UserError, alike on all ranks, where it is none, or is not of the updates that the run has.
    """
    adapter = ranks.first(lambda: read_adapter(folder, model, lora))
    engine.load_weights(adapter)
    note(f"low-rank updates of {len(adapter.names) // 2} matrices from {folder}")


def in_layers(names: Sequence[str]) -> str:
    """Parameter names, those of several layers once: `head.bias, {1,2}.mlp.fc1`."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layer, _, rest = name.partition(".")
        key, own = (f".{rest}", [layer]) if layer.isdigit() else (name, [])
        layers.setdefault(key, []).extend(own)
    return ", ".join(
        f"{{{','.join(of)}}}{name}" if len(of) > 1 else "".join(of) + name for name, of in layers.items()
    )


def find_moments(source: Path, ranks: Ranks) -> WeightSource:
    """The run or checkpoint of init.moments, on all ranks. Raises UserError, alike, for what is neither."""
    found = WeightSource.find("init.moments", source, ranks)
    if found.checkpoint is None:
        raise UserError(
            f"init.moments={source} is a dense model without AdamW's moments; give a run of this project, or remove it"
        )
    return found


def start_with_moments(source: Path, model: Model, engine: Engine, ranks: Ranks, note: Note) -> None:
    """Take AdamW's moments of a run's newest good checkpoint, or of a checkpoint folder, for weights that fit.

    Raises UserError, alike on all ranks, where there is no checkpoint, or none of its moments belongs to the model.
    """
    found = find_moments(source, ranks)
    count = engine.load_moments(found.tensors(model))
    if not count:
        raise UserError(
            f"init.moments={source}: it holds no AdamW moments of this model's weights; give a run of this project "
            "that trained them, or remove init.moments"
        )
    note(f"AdamW's moments of {count} weights from {source}")
