"""Attention transfer of a model larger than memory: one block of layers after the other, then a checkpoint of them all.

Layers learn apart from each other, so a block needs of the layers before it only what they hand on: the teacher's
hidden states, which wait on disk.
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

from data_pipeline.corpus import Corpora
from data_pipeline.loader import TrainingBatches
from megakernel.checkpoint.files import CheckpointTensors, write_layer, write_rest
from megakernel.checkpoint.folder import CheckpointFolder
from megakernel.checkpoint.frozen import frozen_model
from megakernel.checkpoint.manifest import SavedProgress
from megakernel.checkpoint.trained_run import BLOCK
from megakernel.checkpoint.universal import WEIGHT, Partition, WholeTensors, partitions
from megakernel.checkpoint.universal_load import compare, load_weights
from megakernel.checkpoint.weight_source import WeightSource
from megakernel.config import Config, RunFailed, UserError
from megakernel.config.section import merged
from megakernel.config.validation import validate
from megakernel.model import LanguageModel, ModelSettings, layer_list
from megakernel.model.layer import TransformerLayer
from megakernel.model.layer_inputs import LayerInputs
from megakernel.model.settings import DTYPES, model_settings
from megakernel.parallel import Mesh, OneProcess
from megakernel.parallel.ranks import Ranks
from megakernel.training.engine import model_inputs, reading
from megakernel.training.environment import package_versions
from megakernel.training.observing.metrics_writer import Entry, MetricsWriter, logged
from megakernel.training.observing.observed import Providers
from megakernel.training.optimizer import freeze, learns
from megakernel.training.resume import check_weights
from megakernel.training.run_folder import RunFolder, stop_file
from megakernel.training.stop_requests import Stop, StopRequests
from megakernel.training.trainer import Trainer
from megakernel.training.watchdog import Watchdog

from .distilled import Teacher
from .hidden_states import HiddenStates
from .objectives import TaughtModel
from .transferred import LayerTransfer


class BlockTransfer:
    """One process's part of a transfer stage that takes `block_layers` layers at a time.

    Its folder holds a run for each block, layers_FIRST-LAST, and while these train the teacher's states before the next
    one. In the end it has the checkpoint and the curves of a stage that took all layers at once. Whatever is there
    whole is not made again, so the same command goes on from wherever it was stopped.
    """

    def __init__(
        self,
        config: Config,
        block_layers: int,
        mesh: Mesh,
        providers: Providers,
        inside: Sequence[Path],
        note: Callable[[str], None],
    ):
        """config: of the stage. inside: folders whose stop files are heeded too. note: tells, on rank 0.

        Raises UserError, alike on all ranks, for weights that are not the model's, mechanisms without weights of their
        own, and too little free disk.
        """
        self.config, self.mesh, self.providers, self.note = config, mesh, providers, note
        self.ranks = Ranks.of(mesh)
        self.folder = RunFolder(config, self.ranks)
        self.inside = [*inside, self.folder.path]
        source = config.init.source
        assert source is not None
        self.source = WeightSource.find("init.from", source, self.ranks)
        self.corpora = Corpora(config.data)
        self.settings = model_settings(config, mesh, self.corpora.vocab_size)
        specs = layer_list(self.settings)
        self.first = config.model.first_layer
        self.places = [place for place, spec in enumerate(specs) if place == 0 or spec.shared is None]
        count = config.model.num_layers
        self.blocks = [range(at, min(at + block_layers, count)) for at in range(0, count, block_layers)]
        self.learning = self.ranks.alike(self._layers_that_learn)
        self.ranks.first(self._check_disk)

    def run(self) -> Stop:
        """Train what is left and put the checkpoint together, or obey a request to stop."""
        self.folder.open([self.mesh.device.type])
        self.folder.keep_tokenizer(self.corpora.tokenizer_folder, self.corpora.tokenizer_hash)
        for number, layers in enumerate(self.blocks, 1):
            if not self.learning & set(layers) or self._saved(layers) is not None:
                continue
            self.note(f"block {number}/{len(self.blocks)}: layers {layers.start} to {layers.stop - 1}")
            entering, stop = self._entering(layers)
            stop = stop or self._train(layers, entering)
            gc.collect()  # engines hold themselves in circles
            if stop:
                return stop
            if self.mesh.rank == 0:
                self.folder.fix()
        self.ranks.first(lambda: shutil.rmtree(self._hidden, ignore_errors=True))
        self._assemble()
        return Stop.NONE

    @property
    def bytes_between(self) -> int:
        """Of the hidden states between two blocks, on disk; 0 where there is one block."""
        return self._states(0).bytes if len(self.blocks) > 1 else 0

    @property
    def _hidden(self) -> Path:
        return self.folder.path / "hidden_states"

    def _states(self, layer: int) -> HiddenStates:
        return HiddenStates(self._hidden / f"before_{layer}", self.config, self.mesh)

    def _run_of(self, layers: range) -> Config:
        """The run of a block: the stage's, of which nothing is measured that takes the whole model."""
        changes = {
            "run": {"name": f"{BLOCK}{layers.start}-{layers.stop - 1}", "root": str(self.folder.path)},
            "init": {"from": None},
            "training": {"eval_samples": 0, "eval_every": None},
            "logging": {"analysis_every": None, "sample_prompt": None},
        }
        return validate(merged(self.config.model_dump(mode="json"), changes))

    def _saved(self, layers: range) -> CheckpointTensors | None:
        """The last checkpoint of a block; None before it is there."""
        root = self._run_of(layers).run.folder / "checkpoints"
        if not self.ranks.first(root.is_dir):
            return None
        newest = CheckpointFolder(root, keep=1, ranks=self.ranks).newest_good().checkpoint
        if newest is None or newest.step < self.config.training.steps:
            return None
        return CheckpointTensors(newest)

    def _places_of(self, layers: range) -> range:
        """In the list of layers; the embedding goes with the first block."""
        return range(self.first + layers.start if layers.start else 0, self.first + layers.stop)

    def _layers_that_learn(self) -> set[int]:
        """Those whose mechanism owns weights, once it is known that the source's weights are the model's."""
        model = self.config.model
        alone = replace(self.settings, mesh=OneProcess(), shapes_only=True)
        with torch.device("meta"):
            shapes = LanguageModel(alone)
        tensors = self.source.tensors(model)
        own = {name: tuple(tensor.shape) for name, tensor in shapes.state_dict().items()}
        check_weights(self.source, tensors, compare(own, tensors), model, self.settings.vocab_size)
        freeze(shapes, self.config.optimizer.trained, partial(learns, self.config))
        layers = [layer for layer in shapes.modules() if isinstance(layer, TransformerLayer)]
        return {layer.index for layer in layers if any(weight.requires_grad for weight in layer.parameters())}

    def _check_disk(self) -> None:
        """Raise UserError where the disk has no room for the states between two blocks while the next are written."""
        size = self.bytes_between
        if not size:
            return
        passes = len(self.blocks) - 1
        there = sum(file.stat().st_size for file in self._hidden.rglob("*.bin"))
        place = next(path for path in (self.folder.path, *self.folder.path.parents) if path.exists())
        needed, free = min(passes, 2) * size, shutil.disk_usage(place).free + there
        said = f"hidden states between blocks take {_megabytes(size)}"
        said += f", {_megabytes(2 * size)} while the next are written" * (passes > 1)
        if needed > free:
            raise UserError(
                f"uptrain.transfer.block_layers={len(self.blocks[0])}: {said}, and run.root={self.config.run.root} has "
                f"{_megabytes(free)}; free space, choose another run.root, or lower uptrain.transfer.steps"
            )
        self.note(f"{said}; {_megabytes(free)} are free")

    def _teacher(self, layers: range, entering: HiddenStates | None) -> "BlockTeacher":
        wanted, dtype = self.source.model(), DTYPES[self.config.training.dtype]
        model = frozen_model(self.settings, wanted, self.source, dtype, self._places_of(layers))
        return BlockTeacher(model, entering)

    def _entering(self, layers: range) -> tuple[HiddenStates | None, Stop]:
        """The teacher's states before a block, made from the last that are there; None before the first.

        Each block on the way hands on what it makes of those before it, which then are removed.
        """
        starts = [block.start for block in self.blocks if 0 < block.start <= layers.start]
        at = max((start for start in starts if self._states(start).are_there()), default=0)
        entering = self._states(at) if at else None
        self._remove_states(but=at)
        for block in self.blocks:
            if not at <= block.start < layers.start:
                continue
            leaving = self._states(block.stop)
            if stop := self._hand_on(block, entering, leaving):
                return None, stop
            self._remove_states(but=block.stop)
            entering = leaving
        return entering, Stop.NONE

    def _remove_states(self, but: int) -> None:
        """Of all layers but one, and what a kill has left unfinished."""
        kept = self._states(but).folder

        def remove() -> None:
            for folder in self._hidden.glob("*"):
                if folder != kept:
                    shutil.rmtree(folder, ignore_errors=True)

        self.ranks.first(remove)

    def _hand_on(self, layers: range, entering: HiddenStates | None, leaving: HiddenStates) -> Stop:
        """Write what leaves a block of the teacher, whole or not at all where a request to stop comes."""
        steps, mesh = self.config.training.steps, self.mesh
        self.note(f"hidden states before layer {layers.stop}: writing {_megabytes(leaving.bytes)}")
        teacher = self._teacher(layers, entering)
        batches = TrainingBatches(self.config, self.corpora, **reading(mesh)).from_step(0)
        stop_files = map(stop_file, self.inside) if mesh.rank == 0 else ()
        limits = self.config.parallel.timeout_minutes, self.config.parallel.stall_minutes
        try:
            with (
                StopRequests(*stop_files) as requests,
                Watchdog(mesh, *limits, self.folder.path) as watchdog,
                leaving.writing(),
            ):
                for step in range(steps):
                    with watchdog.step(step):
                        teacher.begin_step(step)
                        inputs = model_inputs(next(batches), mesh)
                        for one in inputs:
                            leaving.append(teacher.hidden(one))
                        stop = Stop(mesh.agree(requests.pending()))
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
                f"{leaving.folder} could not be written ({_megabytes(free)} free): {error}. What was trained is "
                "untouched; free space, then start the same command again to continue"
            ) from None
        return Stop.NONE

    def _train(self, layers: range, entering: HiddenStates | None) -> Stop:
        def model(settings: ModelSettings, loss_scale: Callable[[], float]) -> TaughtModel:
            made = BlockStudent(settings, range(self.first + layers.start, self.first + layers.stop))
            teacher = self._teacher(layers, entering)
            made.objective = LayerTransfer(made, teacher, self.config, self.mesh)
            return made

        providers = replace(self.providers, make_model=lambda *_: model)
        start = self.source.tensors(self.config.model)
        return BlockTrainer(start, self._run_of(layers), self.mesh, providers, self.inside).run()

    def _assemble(self) -> None:
        """Save the stage's checkpoint, layer by layer, and its curves."""
        steps = self.config.training.steps
        self.note(f"putting {len(self.blocks)} blocks together")
        found = [self._saved(layers) for layers in self.blocks if self.learning & set(layers)]
        trained = [one for one in found if one is not None]
        assert len(trained) == len(found)
        self.ranks.first(self._write_metrics)
        samples, tokens = self.config.training.consumed(steps)
        layout = {"tensor": self.mesh.tp.size, "context": 1, "data": 1, "pipeline": 1, "zero_stage": 0}
        progress = SavedProgress(steps, samples, tokens, layout, package_versions())
        checkpoints = CheckpointFolder(self.folder.checkpoints, keep=1, ranks=self.ranks)
        checkpoints.remove_leftovers()
        skipped = sum(block.counters["skipped_steps"] for block in trained)
        counters = {"global_steps": steps, "global_samples": samples, "skipped_steps": skipped}
        written: list[Path] = []

        def write(folder: Path) -> None:
            if self.mesh.gradient.rank == 0:
                written.extend(self._write_layers(folder, trained, counters))

        checkpoints.save(progress, write, lambda: written)
        if self.mesh.rank == 0:
            self.folder.fix()

    def _write_layers(
        self, folder: Path, trained: Sequence[CheckpointTensors], counters: Mapping[str, int]
    ) -> Iterator[Path]:
        """What blocks have learned as they have it, in float32; all else in the run's dtype, as a run has it."""
        tp = self.mesh.tp
        homes = {name: one for one in trained for name in one.names}
        dtype, every = DTYPES[self.config.training.dtype], dict[str, Partition]()
        for place in self.places:
            layer = LanguageModel(self.settings, range(place, place + 1))
            shares = partitions(layer)
            # Opened anew: pages of files that stay mapped stay in this process's memory.
            tensors = self.source.tensors(self.config.model)
            load_weights(layer, shares, tp, tensors, tensors.names)
            state = {}
            for name, tensor in layer.state_dict().items():
                if name not in shares:
                    continue
                key = name.split(".", 2 if name.startswith("tied_modules.") else 1)[-1]
                if name in homes:
                    whole = homes[name].read(name, [WEIGHT])[WEIGHT]
                    state[key] = shares[name].shard(whole, tp.rank, tp.size).clone()
                else:
                    state[key] = tensor.to(dtype) if tensor.is_floating_point() else tensor
            yield write_layer(folder, place, tp.rank, state)
            every |= shares
        yield write_rest(folder, tp.rank, every, counters)

    def _write_metrics(self) -> None:
        """The curves of all blocks as those of one run, in which every layer learned at once."""
        runs = [self._run_of(layers).run.folder for layers in self.blocks if self.learning & set(layers)]
        tensorboard = self.folder.tensorboard if self.config.logging.tensorboard else None
        with MetricsWriter(self.folder.metrics_file, tensorboard, 0) as writer:
            writer.describe(self.config)
            for step, scalars in together(runs):
                writer.write(step, Entry(scalars))
            writer.finish(self.config)


class _Stopped(Exception):
    """Leaves the writing of hidden states without an end."""

    def __init__(self, stop: Stop):
        super().__init__(stop.name)
        self.stop = stop


@dataclass(eq=False)
class BlockTeacher(Teacher):
    """A block of a teacher's layers, which takes what enters it from disk."""

    entering: HiddenStates | None = None
    """None: the block begins with the embedding."""

    _next: int = 0

    def begin_step(self, step: int) -> None:
        """The micro-batches of `step`, counted from 0, come next."""
        if self.entering is not None:
            self._next = step * self.entering.per_step

    def hidden(self, inputs: LayerInputs) -> Tensor:
        """States (N, B, C) behind the block, of the next micro-batch."""
        if self.entering is not None:
            inputs = (self.entering.read(self._next), *inputs[1:])
            self._next += 1
        return super().hidden(inputs)


class BlockStudent(TaughtModel):
    """A block's mechanisms, under the names that they have in the whole model."""

    def _build(self, index: int, spec: Any) -> Callable[..., Any]:
        layer = super()._build(index, spec)
        assert isinstance(layer, TransformerLayer)
        # A layer is drawn whole, so that its mechanism is drawn as always; the rest of it is the teacher's.
        for part, kept in ((layer, "self_attention"), (layer.self_attention, "core")):
            for name, _ in list(part.named_children()):
                if name != kept:
                    setattr(part, name, None)
        return layer

    def begin_step(self, step: int) -> None:
        """As of a `LanguageModel`."""
        super().begin_step(step)
        assert isinstance(self.objective.teacher, BlockTeacher)
        self.objective.teacher.begin_step(step)


class BlockTrainer(Trainer):
    """Trains a block's mechanisms."""

    def __init__(self, start: WholeTensors, *arguments: Any):
        """start: the whole model's weights; mechanisms begin with those of theirs that are among them."""
        super().__init__(*arguments)
        self._start = start

    def _begin(self) -> int:
        done = super()._begin()
        if done == 0:
            self.engine.load_weights(self._start)
        return done


_ADDED = ("train/loss", "train/skipped_steps", "throughput/step_time", "throughput/data_time")
"""Of a step the sum over blocks."""


def together(runs: Iterable[Path]) -> Iterator[tuple[int, dict[str, float]]]:
    """Step and scalars, the blocks' metrics taken as those of one run: losses and times add up, rates do not."""
    steps: dict[int, dict[str, list[float]]] = {}
    for run in runs:
        for entry in logged(run):
            tags = steps.setdefault(entry.pop("step"), {})
            for tag, value in entry.items():
                tags.setdefault(tag, []).append(math.nan if value is None else value)
    for step in sorted(steps):
        yield step, {tag: _one(tag, values) for tag, values in steps[step].items()}


def _one(tag: str, values: list[float]) -> float:
    if tag in _ADDED:
        return sum(values)
    if tag == "train/grad_norm":
        return math.hypot(*values)
    if tag.startswith("throughput/"):  # of the same tokens and operations in the time of all
        return 1 / sum(1 / value for value in values) if all(values) else 0.0
    return max(values)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
