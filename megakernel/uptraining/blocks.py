"""Attention transfer of a model larger than memory: one block of layers after another, then a checkpoint of all.

Layers are trained independently, so a block needs only the teacher's hidden states before it, which are stored on disk.
"""

import gc
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_pipeline.loader import TrainingBatches
from megakernel.checkpoint.files import CheckpointTensors, write_layer, write_model_states
from megakernel.checkpoint.folder import CheckpointFolder, Records
from megakernel.checkpoint.frozen import frozen_model
from megakernel.checkpoint.manifest import SavedProgress, flushed
from megakernel.checkpoint.sharded_load import compare, load_weights
from megakernel.checkpoint.trained_run import BLOCK_PREFIX
from megakernel.checkpoint.weight_source import WeightSource
from megakernel.checkpoint.whole_tensors import WEIGHT, WholeTensors, partitions
from megakernel.config import Config, RunFailed, UserError
from megakernel.config.errors import existing_parent
from megakernel.config.section import merged
from megakernel.config.validation import validate
from megakernel.model import LanguageModel, ModelSettings, layer_list
from megakernel.model.layer import TransformerLayer
from megakernel.model.layer_inputs import LayerInputs
from megakernel.model.settings import DTYPES, model_settings
from megakernel.parallel import Mesh, OneProcess
from megakernel.parallel.partition import Partition
from megakernel.parallel.ranks import Ranks
from megakernel.training.data import build_indices, open_corpora
from megakernel.training.engine import loader_arguments, model_inputs
from megakernel.training.environment import package_versions
from megakernel.training.observing.metrics_writer import MetricsWriter, StepMetrics, read_metrics
from megakernel.training.observing.observer import Providers
from megakernel.training.observing.trackers import Trackers
from megakernel.training.optimizer import freeze, is_trained
from megakernel.training.resume import check_weights
from megakernel.training.run_folder import RunFolder, stop_file
from megakernel.training.stop_requests import Stop, StopRequests
from megakernel.training.trainer import Trainer
from megakernel.training.watchdog import Watchdog

from .distillation import Teacher
from .hidden_states import HiddenStates
from .layer_transfer import LayerTransfer
from .objectives import TaughtModel


class BlockTransfer:
    """One process's part of a transfer stage that trains `block_layers` layers at a time.

    Its folder has a run for each block, layers_FIRST-LAST, and during training the teacher's states before the next
    block. At the end it has a checkpoint and metrics like those of a stage that trains all layers at once. Finished
    parts are reused, so the same command continues an interrupted stage.
    """

    def __init__(
        self,
        config: Config,
        block_layers: int,
        mesh: Mesh,
        providers: Providers,
        parent_folders: Sequence[Path],
        note: Callable[[str], None],
    ):
        """config: the stage's configuration. parent_folders: folders whose stop files also end this run. note: prints a
        message on rank 0.

        Raises UserError, alike on all ranks, if the source's weights do not fit the model, if no mechanism has weights
        of its own, or if there is too little free disk space.
        """
        self.config, self.mesh, self.providers, self.note = config, mesh, providers, note
        self.ranks = Ranks.of(mesh)
        self.folder = RunFolder(config, self.ranks)
        self.parent_folders = [*parent_folders, self.folder.path]
        source = config.init.source
        assert source is not None
        self.source = WeightSource.find("init.from", source, self.ranks)
        self.corpora = open_corpora(config, mesh, [*parent_folders, self.folder.path])
        self.settings = model_settings(config, mesh, self.corpora.vocab_size)
        specs = layer_list(self.settings)
        self.first = config.model.first_layer
        self.layer_indices = [place for place, spec in enumerate(specs) if place == 0 or spec.shared is None]
        count = config.model.num_layers
        self.blocks = [range(at, min(at + block_layers, count)) for at in range(0, count, block_layers)]
        trained = self.ranks.each(self._trained_layers)
        self.trained_blocks = [layers for layers in self.blocks if trained & set(layers)]
        self.ranks.on_rank_zero(self._check_disk)

    def run(self) -> Stop:
        """Train the remaining blocks and assemble the checkpoint; return early on a stop request."""
        self.folder.open([self.mesh.device.type])
        self.folder.keep_tokenizer(self.corpora.tokenizer_folder, self.corpora.tokenizer_hash)
        for number, layers in enumerate(self.blocks, 1):
            if layers not in self.trained_blocks or self._saved(layers) is not None:
                continue
            self.note(f"block {number}/{len(self.blocks)}: layers {layers.start} to {layers.stop - 1}")
            input_states, stop = self._input_states(layers)
            stop = stop or self._train(layers, input_states)
            gc.collect()  # engines contain reference cycles
            if stop:
                return stop
            if self.mesh.rank == 0:
                self.folder.fix_configuration()
        self.ranks.on_rank_zero(lambda: shutil.rmtree(self._states_folder, ignore_errors=True))
        self._assemble()
        return Stop.NONE

    @property
    def bytes_between(self) -> int:
        """Disk bytes of the hidden states kept between two blocks; 0 if there is only one block."""
        return self._states(0).bytes if len(self.blocks) > 1 else 0

    @property
    def _states_folder(self) -> Path:
        return self.folder.path / "hidden_states"

    def _states(self, layer: int) -> HiddenStates:
        return HiddenStates(self._states_folder / f"before_{layer}", self.config, self.mesh)

    def _run_of(self, layers: range) -> Config:
        """Configuration of a block's run: the stage's, without the evaluations that need the whole model."""
        changes = {
            "run": {"name": f"{BLOCK_PREFIX}{layers.start}-{layers.stop - 1}", "root": str(self.folder.path)},
            "init": {"from": None},
            "training": {"eval_samples": 0, "eval_every": None},
            # Trackers get the stage's metrics, of all blocks.
            "logging": {"analysis_every": None, "sample_prompt": None, "wandb": None, "trackio": None},
        }
        return validate(merged(self.config.model_dump(mode="json"), changes))

    def _saved(self, layers: range) -> CheckpointTensors | None:
        """The checkpoint of a block's last step; None if it is not finished."""
        root = self._run_of(layers).run.folder / "checkpoints"
        newest = CheckpointFolder(root, keep=1, ranks=self.ranks).newest_good().checkpoint
        if newest is None or newest.step < self.config.training.steps:
            return None
        return CheckpointTensors(newest)

    def _block_indices(self, layers: range) -> range:
        """Indices of a block in the list of layers; the embedding belongs to the first block."""
        return range(self.first + layers.start if layers.start else 0, self.first + layers.stop)

    def _trained_layers(self) -> set[int]:
        """Layers whose mechanism has weights, after a check that the source's weights fit the model."""
        model = self.config.model
        one_process = replace(self.settings, mesh=OneProcess(), shapes_only=True)
        with torch.device("meta"):
            meta_model = LanguageModel(one_process)
        tensors = self.source.tensors(model)
        expected = {name: tuple(tensor.shape) for name, tensor in meta_model.state_dict().items()}
        check_weights(self.source, tensors, compare(expected, tensors), model, self.settings.vocab_size)
        freeze(meta_model, self.config.optimizer.trained, partial(is_trained, self.config))
        layers = [layer for layer in meta_model.modules() if isinstance(layer, TransformerLayer)]
        return {layer.index for layer in layers if any(weight.requires_grad for weight in layer.parameters())}

    def _check_disk(self) -> None:
        """Raise UserError if the disk has no space for the states between two blocks and for the next ones."""
        size = self.bytes_between
        if not size:
            return
        passes = len(self.blocks) - 1
        stored = sum(file.stat().st_size for file in self._states_folder.rglob("*.bin"))
        free = shutil.disk_usage(existing_parent(self.folder.path)).free + stored
        needed = min(passes, 2) * size
        text = f"hidden states between blocks take {_megabytes(size)}"
        text += f", {_megabytes(2 * size)} while the next are written" * (passes > 1)
        if needed > free:
            raise UserError(
                f"uptrain.transfer.block_layers={len(self.blocks[0])}: {text}, and run.root={self.config.run.root} has "
                f"{_megabytes(free)}; free space, choose another run.root, or lower uptrain.transfer.steps"
            )
        self.note(f"{text}; {_megabytes(free)} are free")

    def _teacher(self, layers: range, input_states: HiddenStates | None) -> "BlockTeacher":
        wanted, dtype = self.source.model(), DTYPES[self.config.training.dtype]
        model = frozen_model(self.settings, wanted, self.source, dtype, self._block_indices(layers))
        return BlockTeacher(model, input_states)

    def _input_states(self, layers: range) -> tuple[HiddenStates | None, Stop]:
        """The teacher's states before a block, computed from the latest stored ones; None for the first block.

        Each block in between is run on the states before it, which are then removed.
        """
        starts = [block.start for block in self.blocks if 0 < block.start <= layers.start]
        at = max((start for start in starts if self._states(start).are_complete()), default=0)
        input_states = self._states(at) if at else None
        self._remove_states(keep=at)
        for block in self.blocks:
            if not at <= block.start < layers.start:
                continue
            output = self._states(block.stop)
            if stop := self._run_teacher(block, input_states, output):
                return None, stop
            self._remove_states(keep=block.stop)
            input_states = output
        return input_states, Stop.NONE

    def _remove_states(self, keep: int) -> None:
        """Delete all stored states except those before layer `keep`, and unfinished ones."""
        kept = self._states(keep).folder

        def remove() -> None:
            for folder in self._states_folder.glob("*"):
                if folder != kept:
                    shutil.rmtree(folder, ignore_errors=True)

        self.ranks.on_rank_zero(remove)

    def _run_teacher(self, layers: range, input_states: HiddenStates | None, output: HiddenStates) -> Stop:
        """Run a block of the teacher and write its output states; a stop request leaves nothing written."""
        steps, mesh = self.config.training.steps, self.mesh
        self.note(f"hidden states before layer {layers.stop}: writing {_megabytes(output.bytes)}")
        teacher = self._teacher(layers, input_states)
        training = TrainingBatches(self.config, self.corpora, **loader_arguments(mesh))
        build_indices(self.config, mesh, training)
        batches = training.from_step(0)
        stop_files = map(stop_file, self.parent_folders) if mesh.rank == 0 else ()
        limits = self.config.parallel.timeout_minutes, self.config.parallel.stall_minutes
        try:
            with (
                StopRequests(*stop_files) as requests,
                Watchdog(mesh, *limits, self.folder.path) as watchdog,
                output.writing(),
            ):
                for step in range(steps):
                    with watchdog.step(step):
                        teacher.begin_step(step)
                        inputs = model_inputs(next(batches), mesh)
                        for one in inputs:
                            output.append(teacher.hidden(one))
                        stop = Stop(*mesh.all_reduce_max(requests.pending()))
                    if stop:
                        requests.accept(stop)
                        requests.saved()
                        raise _Stopped(stop)
        except _Stopped as stopped:
            self.note(f"stopped by {stopped.stop.name}; start the same command to continue")
            return stopped.stop
        except OSError as error:
            free = shutil.disk_usage(self.folder.path).free
            raise RunFailed(
                f"{output.folder} could not be written ({_megabytes(free)} free): {error}. What was trained is "
                "untouched; free space, then start the same command again to continue"
            ) from None
        return Stop.NONE

    def _train(self, layers: range, input_states: HiddenStates | None) -> Stop:
        def model(settings: ModelSettings, loss_scale: Callable[[], float]) -> TaughtModel:
            student = BlockStudent(settings, range(self.first + layers.start, self.first + layers.stop))
            teacher = self._teacher(layers, input_states)
            student.objective = LayerTransfer(student, teacher, self.config, self.mesh)
            return student

        providers = replace(self.providers, make_model=lambda *_: model)
        start = self.source.tensors(self.config.model)
        return BlockTrainer(start, self._run_of(layers), self.mesh, providers, self.parent_folders).run()

    def _assemble(self) -> None:
        """Save the stage's checkpoint, layer by layer, and its metrics."""
        steps = self.config.training.steps
        self.note(f"putting {len(self.blocks)} blocks together")
        saved = [self._saved(layers) for layers in self.trained_blocks]
        trained = [checkpoint for checkpoint in saved if checkpoint is not None]
        assert len(trained) == len(saved)
        self.ranks.on_rank_zero(self._write_metrics)
        samples, tokens = self.config.training.consumed(steps)
        layout = {"tensor": self.mesh.tp.size, "context": 1, "data": 1, "pipeline": 1, "zero_stage": 0}
        progress = SavedProgress(steps, samples, tokens, layout, package_versions())
        checkpoints = CheckpointFolder(self.folder.checkpoints, keep=1, ranks=self.ranks)
        checkpoints.remove_leftovers()
        skipped = sum(block.counters["skipped_steps"] for block in trained)
        counters = {"global_steps": steps, "global_samples": samples, "skipped_steps": skipped}

        def write(folder: Path) -> Records:
            writes = self.mesh.gradient.rank == 0
            return flushed(folder, self._write_layers(folder, trained, counters)) if writes else {}

        checkpoints.save(progress, write)
        if self.mesh.rank == 0:
            self.folder.fix_configuration()

    def _write_layers(
        self, folder: Path, trained: Sequence[CheckpointTensors], counters: Mapping[str, int]
    ) -> Iterator[Path]:
        """Write trained weights in float32 from the blocks' runs, all others in the run's dtype, as in any run."""
        tp = self.mesh.tp
        trained_by_name = {name: one for one in trained for name in one.names}
        dtype, all_partitions = DTYPES[self.config.training.dtype], dict[str, Partition]()
        for place in self.layer_indices:
            layer = LanguageModel(self.settings, range(place, place + 1))
            shares = partitions(layer)
            # Opened anew for each layer, because pages of mapped files count as this process's memory.
            tensors = self.source.tensors(self.config.model)
            load_weights(layer, shares, tp, tensors, tensors.names)
            state = {}
            for name, tensor in layer.state_dict().items():
                if name not in shares:
                    continue
                key = name.split(".", 2 if name.startswith("tied_modules.") else 1)[-1]
                if name in trained_by_name:
                    whole = trained_by_name[name].read(name, [WEIGHT])[WEIGHT]
                    state[key] = shares[name].shard(whole, tp.rank, tp.size).clone()
                else:
                    state[key] = tensor.to(dtype) if tensor.is_floating_point() else tensor
            yield write_layer(folder, place, tp.rank, state)
            all_partitions |= shares
        yield write_model_states(folder, tp.rank, all_partitions, counters)

    def _write_metrics(self) -> None:
        """Write the metrics of all blocks as those of one run that trained every layer at once."""
        runs = [self._run_of(layers).run.folder for layers in self.trained_blocks]
        tensorboard = self.folder.events if self.config.logging.tensorboard else None
        path = self.folder.path
        trackers = Trackers(self.config, path, self.note, f"{path.parent.name}/{path.name}")
        with MetricsWriter(self.folder.metrics_file, tensorboard, 0, trackers) as writer:
            writer.describe(self.config)
            for step, scalars in merge_metrics(runs):
                writer.write(step, StepMetrics(scalars))
            writer.finish(self.config)


class _Stopped(Exception):
    """A stop request that aborts the writing of hidden states."""

    def __init__(self, stop: Stop):
        super().__init__(stop.name)
        self.stop = stop


@dataclass(eq=False)
class BlockTeacher(Teacher):
    """A block of a teacher's layers, which reads its input states from disk."""

    input_states: HiddenStates | None = None
    """None: the block begins with the embedding."""

    _next: int = 0

    def begin_step(self, step: int) -> None:
        """Continue with the micro-batches of `step`, counted from 0."""
        if self.input_states is not None:
            self._next = step * self.input_states.per_step

    def hidden(self, inputs: LayerInputs) -> Tensor:
        """Output states (N, B, C) of the block for the next micro-batch."""
        if self.input_states is not None:
            inputs = (self.input_states.read(self._next), *inputs[1:])
            self._next += 1
        return super().hidden(inputs)


class BlockStudent(TaughtModel):
    """A block's mechanisms, by the names that they have in the whole model."""

    def _build(self, index: int, spec: Any) -> Callable[..., Any]:
        layer = super()._build(index, spec)
        assert isinstance(layer, TransformerLayer)
        # The whole layer is initialized, so that the mechanism gets its usual weights; only the mechanism is kept.
        for part, kept in ((layer, "self_attention"), (layer.self_attention, "core")):
            for name, _ in list(part.named_children()):
                if name != kept:
                    setattr(part, name, None)
        return layer

    def begin_step(self, step: int) -> None:
        """Do what `LanguageModel.begin_step` does, for the teacher, too."""
        super().begin_step(step)
        assert isinstance(self.objective.teacher, BlockTeacher)
        self.objective.teacher.begin_step(step)


class BlockTrainer(Trainer):
    """Trainer of a block's mechanisms."""

    def __init__(self, start: WholeTensors, *arguments: Any):
        """start: the whole model's weights, from which mechanisms start if it has weights of theirs."""
        super().__init__(*arguments)
        self._start = start

    def _load(self) -> int:
        done = super()._load()
        if done == 0:
            self.engine.load_weights(self._start)
        return done


_TIMES = ("throughput/step_time", "throughput/data_time", "throughput/cpu_time")
_SUMMED_TAGS = ("train/loss", "train/skipped_steps", *_TIMES)
"""Tags whose values are summed over blocks."""


def merge_metrics(runs: Iterable[Path]) -> Iterator[tuple[int, dict[str, float]]]:
    """Step and scalars of the blocks' metrics merged into those of one run: losses and times add up, rates do not."""
    steps: dict[int, dict[str, list[float]]] = {}
    for run in runs:
        for entry in read_metrics(run):
            tags = steps.setdefault(entry.pop("step"), {})
            for tag, value in entry.items():
                tags.setdefault(tag, []).append(math.nan if value is None else value)
    for step in sorted(steps):
        yield step, {tag: _merge(tag, values) for tag, values in steps[step].items()}


def _merge(tag: str, values: list[float]) -> float:
    if tag in _SUMMED_TAGS:
        return sum(values)
    if tag == "train/grad_norm":
        return math.hypot(*values)
    if tag.startswith("throughput/"):  # every block processes the same tokens; their times add up
        return 1 / sum(1 / value for value in values) if all(values) else 0.0
    return max(values)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
